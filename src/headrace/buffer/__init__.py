"""Where producer and learner meet: versioned groups, the lag policy, filters."""
