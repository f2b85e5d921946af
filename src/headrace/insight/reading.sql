-- What a record and a timeline ask of a run's ledger.

-- steps that have a row and the last of them, restarts and the steps that they took again, and where the spans end
SELECT
    (SELECT COUNT(*) FROM rows),
    (SELECT COALESCE(MAX(step), 0) FROM rows),
    (SELECT COUNT(*) FROM restarts),
    (SELECT COALESCE(SUM(redone_steps), 0) FROM restarts),
    (SELECT COALESCE(MAX(id), 0) FROM spans);

-- what there was after each transfer: the first word is the unit
SELECT at_s,
    SUM(((credit = 'in_flight') - (debit = 'in_flight')) * trajectories) OVER (ORDER BY id) "trajectories in flight",
    SUM(((credit = 'in_flight') - (debit = 'in_flight')) * tokens) OVER (ORDER BY id) "tokens in flight",
    SUM(((credit = 'buffered') - (debit = 'buffered')) * tokens) OVER (ORDER BY id) "tokens buffered"
FROM transfers ORDER BY id
