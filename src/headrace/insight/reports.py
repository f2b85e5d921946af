"""stub"""


def triage_report(*a):
    raise NotImplementedError


plan_report = simulation_report = triage_report
