-- What show.py asks of a run's trajectories.

-- of some: by prompt and group, the lowest and highest reward
SELECT prompt_id, MIN(reward), MAX(reward) FROM trajectories
WHERE rowid > ? AND rowid <= ? AND reward IS NOT NULL GROUP BY serial, prompt_id ORDER BY serial;

-- all that is known of one
SELECT id, prompt_id, serial, attempt, num_tokens, reward, reward_parts, finish, spans,
    submitted_s, started_s, finished_s, scored_s, state, drop_reason, lag, trained_step
FROM trajectories WHERE id = ?;

-- what was booked of it
SELECT at_s, step, credit FROM transfers WHERE trajectory_id = ? ORDER BY id;

-- the newest of each account that names any
SELECT CASE WHEN drop_reason IS NULL THEN state ELSE 'dropped:' || drop_reason END, id FROM trajectories
WHERE rowid IN (SELECT MAX(rowid) FROM trajectories GROUP BY state, drop_reason);

-- the tokens of some, named in a JSON array
SELECT trajectory_id, data FROM journal WHERE trajectory_id IN (SELECT value FROM json_each(?));

-- the attempts at a prompt
SELECT number, state FROM attempts WHERE serial = ? AND prompt_id = ? ORDER BY number;

-- those that are like an id
SELECT id FROM trajectories WHERE serial = ? OR prompt_id = ? OR INSTR(id, ?) LIMIT ?
