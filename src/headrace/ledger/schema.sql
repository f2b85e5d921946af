
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);

CREATE TABLE accounts (
    name TEXT PRIMARY KEY CHECK (name IN ('generated', 'in_flight', 'buffered', 'trained') OR name GLOB 'dropped:?*'),
    tokens INTEGER NOT NULL CHECK (typeof(tokens) = 'integer'),
    trajectories INTEGER NOT NULL CHECK (typeof(trajectories) = 'integer'),
    CHECK (CASE name WHEN 'generated' THEN tokens <= 0 AND trajectories <= 0
                     ELSE tokens >= 0 AND trajectories >= 0 END)
);

CREATE TABLE transfers (
    id INTEGER PRIMARY KEY,
    at_s REAL NOT NULL,
    step INTEGER NOT NULL,
    debit TEXT NOT NULL,
    credit TEXT NOT NULL,
    tokens INTEGER NOT NULL CHECK (typeof(tokens) = 'integer' AND tokens >= 0),
    trajectories INTEGER NOT NULL CHECK (typeof(trajectories) = 'integer' AND trajectories >= 0),
    trajectory_id TEXT,
    lag INTEGER,
    CHECK ((debit = 'generated' AND credit = 'in_flight')
        OR (debit = 'in_flight' AND (credit = 'buffered' OR credit GLOB 'dropped:?*'))
        OR (debit = 'buffered' AND (credit = 'trained' OR credit GLOB 'dropped:?*'))),
    -- only what a crash took away leaves without a name: nobody knows any more which trajectory had how many tokens
    CHECK (debit = 'generated' OR (trajectory_id IS NOT NULL AND trajectories = 1)
        OR (debit = 'in_flight' AND credit IN ('dropped:redone', 'dropped:crashed')))
);
-- A trajectory leaves each account once: so it is trained on once, or dropped once, and never both.
CREATE UNIQUE INDEX transfers_leave_once ON transfers (trajectory_id, debit) WHERE trajectory_id IS NOT NULL;

-- num_tokens counts sampled tokens, num_prompt_tokens all others. `spans` say where the sampled ones are, as
-- [version, start, end]: anywhere in the trajectory, in any number of pieces.
CREATE TABLE trajectories (
    id TEXT PRIMARY KEY,
    prompt_id TEXT NOT NULL,
    serial INTEGER,
    attempt INTEGER,
    idx INTEGER,
    num_tokens INTEGER NOT NULL CHECK (typeof(num_tokens) = 'integer' AND num_tokens >= 0),
    num_prompt_tokens INTEGER,
    reward REAL,
    reward_parts TEXT NOT NULL,
    finish TEXT,
    spans TEXT NOT NULL,
    oldest_version INTEGER,
    submitted_s REAL,
    started_s REAL,
    finished_s REAL,
    scored_s REAL,
    state TEXT NOT NULL CHECK (state IN ('buffered', 'trained', 'dropped')),
    drop_reason TEXT,
    lag INTEGER,
    trained_step INTEGER,
    CHECK ((state = 'dropped') = (drop_reason IS NOT NULL)),
    CHECK ((state = 'trained') = (trained_step IS NOT NULL))
);
CREATE INDEX trajectories_by_state ON trajectories (state);
CREATE INDEX trajectories_by_serial ON trajectories (serial);

-- The tokens of what reached the buffer: a restart trains on them, and `headrace show` prints them.
CREATE TABLE journal (trajectory_id TEXT PRIMARY KEY REFERENCES trajectories (id), data BLOB NOT NULL);

-- Verdicts of the reward function, by a digest of what it saw: a restart does not judge again.
CREATE TABLE verdicts (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, reward REAL NOT NULL, parts TEXT NOT NULL);

CREATE TABLE attempts (
    serial INTEGER NOT NULL,
    number INTEGER NOT NULL CHECK (number >= 1),
    prompt_id TEXT NOT NULL,
    wave INTEGER NOT NULL,
    version INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'closed', 'redone', 'crashed')),
    PRIMARY KEY (serial, number)
);
CREATE UNIQUE INDEX attempts_one_open ON attempts (serial) WHERE state = 'open';

-- Trajectories in flight when the last checkpoint was written, for recovery.in_flight = resume.
CREATE TABLE partials (
    serial INTEGER NOT NULL,
    idx INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (serial, idx)
);

-- Written before the weights change: the groups that each step trains on, in order, as [serial, attempt].
CREATE TABLE steps (step INTEGER PRIMARY KEY, groups TEXT NOT NULL);

CREATE TABLE restarts (
    number INTEGER PRIMARY KEY,
    at_s REAL NOT NULL,
    checkpoint INTEGER NOT NULL,
    version INTEGER NOT NULL,
    rule TEXT NOT NULL,
    redone_steps INTEGER NOT NULL,
    retrained_tokens INTEGER NOT NULL,
    lost_tokens INTEGER NOT NULL,
    lost_trajectories INTEGER NOT NULL
);

CREATE VIEW drops AS
    SELECT id AS trajectory_id, prompt_id, drop_reason AS reason, num_tokens, lag, reward
    FROM trajectories WHERE state = 'dropped';

CREATE TABLE rows (
    step INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,
    wall_s REAL NOT NULL,
    generated_tokens INTEGER NOT NULL,
    trained_tokens INTEGER NOT NULL,
    backlog_tokens INTEGER NOT NULL,
    reward_mean REAL,
    lag_max INTEGER NOT NULL,
    score REAL,
    data TEXT NOT NULL
);

CREATE TABLE spans (
    id INTEGER PRIMARY KEY,
    stage TEXT NOT NULL,
    worker TEXT NOT NULL,
    version INTEGER,
    start_s REAL NOT NULL,
    end_s REAL NOT NULL,
    detail TEXT NOT NULL
);
CREATE INDEX spans_by_end ON spans (end_s);

-- Of each transaction: the rows that it changed, with their digests, and the head of a chain over all.
CREATE TABLE digests (id INTEGER PRIMARY KEY, step INTEGER NOT NULL, head TEXT NOT NULL, changes TEXT NOT NULL);

INSERT INTO accounts VALUES ('generated', 0, 0), ('in_flight', 0, 0), ('buffered', 0, 0), ('trained', 0, 0);

-- An OR REPLACE or OR IGNORE of the statement would outrank the constraints inside a trigger; RAISE outranks both.
CREATE TRIGGER transfers_check BEFORE INSERT ON transfers BEGIN
    SELECT RAISE(ABORT, 'a transfer is never replaced')
        WHERE EXISTS (SELECT 1 FROM transfers WHERE id = NEW.id
                      OR (trajectory_id = NEW.trajectory_id AND debit = NEW.debit));
    SELECT RAISE(ABORT, 'more leaves an account than it holds')
        WHERE NEW.debit <> 'generated' AND NOT EXISTS (
            SELECT 1 FROM accounts
            WHERE name = NEW.debit AND tokens >= NEW.tokens AND trajectories >= NEW.trajectories);
    SELECT RAISE(ABORT, 'a transfer carries exactly the tokens of its trajectory')
        WHERE NEW.trajectory_id IS NOT NULL AND NOT EXISTS (
            SELECT 1 FROM trajectories WHERE id = NEW.trajectory_id AND num_tokens = NEW.tokens);
    SELECT RAISE(ABORT, 'the trajectory is not in the buffer')
        WHERE NEW.debit = 'buffered' AND NOT EXISTS (
            SELECT 1 FROM trajectories WHERE id = NEW.trajectory_id AND state = 'buffered');
    INSERT INTO accounts SELECT NEW.credit, 0, 0
        WHERE NEW.credit GLOB 'dropped:?*' AND NOT EXISTS (SELECT 1 FROM accounts WHERE name = NEW.credit);
END;

CREATE TRIGGER transfers_book AFTER INSERT ON transfers BEGIN
    UPDATE accounts SET tokens = tokens - NEW.tokens, trajectories = trajectories - NEW.trajectories
        WHERE name = NEW.debit;
    UPDATE accounts SET tokens = tokens + NEW.tokens, trajectories = trajectories + NEW.trajectories
        WHERE name = NEW.credit;
END;

CREATE TRIGGER transfers_keep BEFORE UPDATE ON transfers BEGIN
    SELECT RAISE(ABORT, 'a transfer is never changed');
END;
CREATE TRIGGER transfers_stay BEFORE DELETE ON transfers BEGIN
    SELECT RAISE(ABORT, 'a transfer is never deleted');
END;
CREATE TRIGGER accounts_open BEFORE INSERT ON accounts WHEN NEW.tokens <> 0 OR NEW.trajectories <> 0 BEGIN
    SELECT RAISE(ABORT, 'an account opens empty');
END;
CREATE TRIGGER accounts_stay BEFORE DELETE ON accounts BEGIN
    SELECT RAISE(ABORT, 'an account is never deleted');
END;
