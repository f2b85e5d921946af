-- What a record counts: steps that have a row and the last of them, restarts and the steps that they took again, and
-- where the spans end.
SELECT
    (SELECT COUNT(*) FROM rows),
    (SELECT COALESCE(MAX(step), 0) FROM rows),
    (SELECT COUNT(*) FROM restarts),
    (SELECT COALESCE(SUM(redone_steps), 0) FROM restarts),
    (SELECT COALESCE(MAX(id), 0) FROM spans)
