-- What the page asks of a run's transfers and trajectories.

-- for `Tally.update`, trained tokens by lag, of some transfers: step, lag, sum, count
SELECT step, COALESCE(lag, 0), SUM(tokens), COUNT(*) FROM transfers
WHERE id > ? AND id <= ? AND credit = 'trained' GROUP BY 1, 2;

-- the parts of the rewards of what was scored, the same way: step, name of the part, sum, count
SELECT x.step, part.key, SUM(part.value), COUNT(*)
FROM transfers x JOIN trajectories t ON t.id = x.trajectory_id, json_each(t.reward_parts) part
WHERE x.id > ? AND x.id <= ? AND x.debit = 'in_flight' AND t.reward IS NOT NULL
AND part.type IN ('integer', 'real') GROUP BY 1, 2;

-- the rewards of some trajectories
SELECT reward FROM trajectories WHERE rowid BETWEEN ? AND ? AND reward IS NOT NULL;

-- the mean of each part of them
SELECT part.key, AVG(part.value) FROM trajectories t, json_each(t.reward_parts) part
WHERE t.rowid BETWEEN ? AND ? AND t.reward IS NOT NULL AND part.type IN ('integer', 'real') GROUP BY 1;

-- the end of the last span or, if that is later, the last transfer
SELECT MAX(
    COALESCE((SELECT MAX(end_s) FROM spans), 0),
    COALESCE((SELECT at_s FROM transfers ORDER BY id DESC LIMIT 1), 0)
);

-- a page of answers like this, one way or the other, what is told of them in words
SELECT rowid, id, reward, num_tokens,
    IFNULL('dropped: ' || drop_reason, state), CAST(IFNULL(trained_step, '') AS TEXT), CAST(IFNULL(lag, '') AS TEXT),
    finish
FROM trajectories WHERE {} ORDER BY rowid {} LIMIT ?;

-- all answers of a group
SELECT id, prompt_id, attempt, reward, reward_parts, finish, num_tokens, drop_reason,
    CASE state WHEN 'trained' THEN 'trained in step ' || trained_step || ', lag ' || lag ELSE state END
FROM trajectories WHERE serial = ? ORDER BY attempt, idx, id;

-- the groups beside one
SELECT (SELECT MIN(serial) FROM trajectories WHERE serial > ?1), (SELECT MAX(serial) FROM trajectories WHERE serial < ?1);

-- tells a ledger from another in its place
SELECT value FROM meta WHERE key = 'created';

-- the seconds of the last steps
SELECT SUM(wall_s) FROM (SELECT wall_s FROM rows ORDER BY step DESC LIMIT ?)
