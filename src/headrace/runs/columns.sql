-- What columns.py reads of a run's tables.

-- spans from the newest on, along an index
SELECT rowid AS rowid, stage, worker, version, start_s, end_s, detail FROM spans
WHERE rowid > ? AND end_s > ? AND stage = COALESCE(?, stage) ORDER BY {by} DESC LIMIT ?;

-- trajectories from one on
SELECT rowid AS rowid, serial, attempt, num_tokens, num_prompt_tokens, reward, finish,
    started_s, finished_s, scored_s, drop_reason, trained_step
FROM trajectories WHERE rowid >= ? ORDER BY rowid;

-- the first trajectory that left its engine since a moment
SELECT t.rowid FROM transfers x JOIN trajectories t ON t.id = x.trajectory_id
WHERE x.at_s >= ? AND x.debit = 'in_flight' ORDER BY x.id LIMIT 1
