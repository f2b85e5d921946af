-- What a ledger tells of its run in a line.
SELECT (SELECT COALESCE(MAX(step), 0) FROM rows) AS steps,
    (SELECT COUNT(*) FROM restarts) AS num_restarts,
    (SELECT tokens FROM accounts WHERE name = 'trained') AS trained_tokens,
    (SELECT value FROM meta WHERE key = 'run:before') AS score_before,
    (SELECT score FROM rows WHERE score IS NOT NULL ORDER BY step DESC LIMIT 1) AS score_after;

-- the mean rewards of some steps, named in a JSON array
SELECT reward_mean FROM rows WHERE step IN (SELECT value FROM json_each(?)) ORDER BY step
