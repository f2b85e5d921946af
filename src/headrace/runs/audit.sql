-- Whether a run's books are true, for audit.py. Each query selects what the sentence above it needs; of a sound ledger
-- it finds nothing. The tables before the blank line stand before each of the queries.
WITH entries (name, tokens, trajectories) AS (
    SELECT credit, tokens, trajectories FROM transfers
    UNION ALL SELECT debit, -tokens, -trajectories FROM transfers),
sums (name, tokens, trajectories) AS (
    SELECT name, SUM(tokens), SUM(trajectories) FROM entries GROUP BY name),
told AS (
    SELECT step, generated_tokens, trained_tokens, CASE WHEN json_valid(data) THEN data ELSE '{}' END AS data FROM rows),
shown (name, tokens) AS (
    SELECT 'generated', SUM(json_extract(data, '$.generated_tokens')) FROM told
    UNION ALL SELECT 'trained', SUM(json_extract(data, '$.trained_tokens')) FROM told
    UNION ALL SELECT 'dropped:' || key, SUM(value) FROM told, json_each(data, '$.dropped_tokens') GROUP BY key),
named (step, serial, attempt) AS (
    SELECT s.step, json_extract(g.value, '$[0]'), json_extract(g.value, '$[1]') FROM steps s, json_each(s.groups) g),
replay AS (  -- what `buffer.replay` says, and said before a restart: groups per step, and how often one is trained on
    SELECT json_extract(value, '$."buffer.replay"') AS told FROM meta WHERE key = 'run:origin'
    UNION ALL SELECT json_extract(c.value, '$.before') FROM meta, json_each(meta.value) c
    WHERE meta.key = 'run:changes' AND json_extract(c.value, '$.key') = 'buffer.replay')

-- account {} holds {} tokens and {} trajectories, but its transfers add up to {} and {}
SELECT a.name, a.tokens, a.trajectories, COALESCE(s.tokens, 0), COALESCE(s.trajectories, 0)
FROM accounts a LEFT JOIN sums s ON s.name = a.name
WHERE a.tokens <> COALESCE(s.tokens, 0) OR a.trajectories <> COALESCE(s.trajectories, 0);
-- account {} has transfers but does not exist
SELECT name FROM sums WHERE name NOT IN (SELECT name FROM accounts);
-- the accounts add up to {} tokens and {} trajectories instead of zero
SELECT * FROM (SELECT SUM(tokens) AS t, SUM(trajectories) AS n FROM accounts)
WHERE t <> 0 OR n <> 0;
-- account {} is below zero: {} tokens, {} trajectories
SELECT name, tokens, trajectories FROM accounts
WHERE name <> 'generated' AND (tokens < 0 OR trajectories < 0);
-- transfer {} goes from {} to {}, which no trajectory does
SELECT id, debit, credit FROM transfers
WHERE (debit, credit) NOT IN (
    VALUES ('generated', 'in_flight'), ('in_flight', 'buffered'), ('buffered', 'trained'))
AND NOT (debit IN ('in_flight', 'buffered') AND credit GLOB 'dropped:?*');
-- transfer {} is of a negative amount: {} tokens, {} trajectories
SELECT id, tokens, trajectories FROM transfers WHERE tokens < 0 OR trajectories < 0;
-- trajectory {} entered account {} {} times
SELECT trajectory_id, credit, COUNT(*) FROM transfers WHERE trajectory_id IS NOT NULL
GROUP BY trajectory_id, credit HAVING COUNT(*) > 1;
-- trajectory {} left account {} {} times
SELECT trajectory_id, debit, COUNT(*) FROM transfers WHERE trajectory_id IS NOT NULL
GROUP BY trajectory_id, debit HAVING COUNT(*) > 1;
-- trajectory {} left the buffer for {} without having entered it
SELECT x.trajectory_id, x.credit FROM transfers x WHERE x.debit = 'buffered' AND NOT EXISTS (
    SELECT 1 FROM transfers y
    WHERE y.trajectory_id = x.trajectory_id AND y.credit = 'buffered' AND y.id < x.id);
-- transfer {} names trajectory {}, which is not recorded
SELECT id, trajectory_id FROM transfers
WHERE trajectory_id IS NOT NULL AND trajectory_id NOT IN (SELECT id FROM trajectories);
-- transfer {} moves {} tokens of trajectory {}, which has {}
SELECT x.id, x.tokens, t.id, t.num_tokens
FROM transfers x JOIN trajectories t ON t.id = x.trajectory_id WHERE x.tokens <> t.num_tokens;
-- trajectory {} is recorded as {}, but its last transfer went to {}
SELECT * FROM (
    SELECT t.id, CASE t.state WHEN 'dropped' THEN 'dropped:' || t.drop_reason ELSE t.state END AS recorded,
    COALESCE((SELECT credit FROM transfers x WHERE x.trajectory_id = t.id ORDER BY x.id DESC LIMIT 1),
        'no account') AS booked FROM trajectories t) WHERE recorded IS NOT booked;
-- trajectory {} is recorded with lag {}, but was booked with lag {}
SELECT t.id, t.lag, x.lag FROM transfers x JOIN trajectories t ON t.id = x.trajectory_id
WHERE x.credit NOT IN ('in_flight', 'buffered') AND t.lag IS NOT x.lag;
-- span {} of stage {} ends at {} s, before its start at {} s
SELECT id, stage, end_s, start_s FROM spans WHERE end_s < start_s;
-- row {} disagrees with its own columns
SELECT step FROM told WHERE data <> '{}' AND (step, generated_tokens, trained_tokens) IS NOT
    (json_extract(data, '$.step'), json_extract(data, '$.generated_tokens'), json_extract(data, '$.trained_tokens'));
-- the first row is of step {}
SELECT first FROM (SELECT MIN(step) AS first FROM rows) WHERE first > 1;
-- row {} follows row {}: steps are missing between them
SELECT step, before FROM (SELECT step, LAG(step) OVER (ORDER BY step) AS before FROM rows)
WHERE step > before + 1;
-- row {} shows {} trained tokens, but {} were booked for its step
SELECT r.step, json_extract(r.data, '$.trained_tokens') AS shown, COALESCE(b.tokens, 0) AS booked FROM told r
LEFT JOIN (SELECT step, SUM(tokens) AS tokens FROM transfers WHERE credit = 'trained' GROUP BY step) b
ON b.step = r.step WHERE shown <> booked;
-- the rows show {} tokens {}, more than the {} in its account
SELECT s.tokens, s.name, COALESCE(ABS(a.tokens), 0) AS held
FROM shown s LEFT JOIN accounts a ON a.name = s.name WHERE s.tokens > held ORDER BY s.name;
-- the run has finished, but its rows show {} of the {} tokens {}
SELECT COALESCE(s.tokens, 0) AS seen, due.tokens, due.name FROM (
    SELECT CASE debit WHEN 'generated' THEN debit ELSE credit END AS name, SUM(tokens) AS tokens FROM transfers
    WHERE credit <> 'buffered' AND (step <= (SELECT COALESCE(MAX(step), 0) FROM rows) OR credit = 'trained')
    GROUP BY 1) due
LEFT JOIN shown s ON s.name = due.name WHERE :finished AND due.tokens > seen;
-- step {} names group {}, which was first trained on in step {}
SELECT n.step, n.serial, t.trained_step FROM named n JOIN trajectories t ON t.serial = n.serial AND t.attempt = n.attempt
WHERE t.state = 'trained' AND t.trained_step > n.step GROUP BY n.step, n.serial;
-- group {} was trained on {} times, and at most {} are allowed
SELECT serial, COUNT(*) AS times, most FROM named, (
    SELECT COALESCE(MAX(CASE WHEN json_extract(told, '$[0]') > 0 THEN json_extract(told, '$[1]') END), 1) AS most FROM replay)
GROUP BY serial, attempt HAVING times > most;
-- row {} shows {} tokens trained on again, but its step names {}
SELECT r.step, json_extract(r.data, '$.again_tokens') AS shown, COALESCE(b.tokens, 0) AS due FROM told r LEFT JOIN (
    SELECT n.step, SUM(t.num_tokens) AS tokens FROM named n
    JOIN trajectories t ON t.serial = n.serial AND t.attempt = n.attempt
    WHERE t.state = 'trained' AND t.trained_step < n.step GROUP BY n.step) b ON b.step = r.step
WHERE shown <> due AND NOT json_extract(r.data, '$.skipped');
