"""What is drawn in these tests: plans of a small GPT, rehearsed and played on a shipped cluster."""

from functools import cache

from meshwise.simulate.cluster import parse_cluster
from meshwise.simulate.rehearsal import rehearse
from meshwise.simulate.step_prediction import Prediction, predict
from meshwise.view.drawing_data import PlanAccount, predicted_account
from simulate.subjects import gpt_subject

SPLIT = "pp=2 dp=2 tp=2 microbatches=4 zero=1"
SHARDED = "dp=8 zero=3"


@cache
def prediction(plan: str) -> Prediction:
    subject = gpt_subject(stages=2 if "pp=2" in plan else 1)
    return predict(rehearse(subject, plan=plan, ranks=8, device="cuda"), cluster=parse_cluster("2x4 h100"))


@cache
def account(plan: str) -> PlanAccount:
    return predicted_account(prediction(plan))
