"""Test the files that `meshwise launch` writes: against kept ones, and by what reads them where that is installed."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from meshwise.cli.main import main

KEPT = Path(__file__).parent / "launch"
RECIPES = ("slurm", "kubernetes", "ray", "sagemaker", "azureml")
JOB = """
plan = "dp=auto zero=3"
[train]
save_every = 100
output = "runs/demo"
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("demo.toml").write_text(JOB)
    return Path("demo.toml")


def recipe(job: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", str(job), *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", RECIPES)
def test_the_file_is_the_kept_one(kind: str, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a change that is meant: meshwise launch demo.toml --for KIND --nodes 8, into the folder launch."""
    [kept] = KEPT.glob(f"{kind}.*")
    assert recipe(job, capsys, "--for", kind, "--nodes", "8") == kept.read_text()


@pytest.mark.parametrize("kind", RECIPES)
def test_every_node_is_examined_first_and_the_run_resumes(
    kind: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = recipe(job, capsys, "--for", kind)
    assert 0 < text.index("doctor") < text.rindex("train.resume")
    assert "stop" in text
    assert not any(f"{{{{{name}}}}}" in text for name in ("job", "nodes", "name", "stop"))


def test_it_is_written_where_one_says(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "wrote mine.sbatch" in recipe(job, capsys, "--write", "mine.sbatch")
    assert "sbatch mine.sbatch\n" in Path("mine.sbatch").read_text()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--nodes", "0"], "nodes = 0 has to be at least 1"),
        (["--hours", "1", "--grace", "3600"], "grace = 3600 seconds are not before the end of 1 h"),
        (["--folder", "/my runs"], "folder = '/my runs'"),
        (["--image", "a'b"], 'image = "a\'b"'),
        (["--for", "slrum"], "invalid choice 'slrum'"),
    ],
)
def test_what_cannot_work_is_refused(
    words: list[str], message: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", str(job), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_for_other_ranks_and_a_job_without_checkpoints_are_refused(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB.replace("dp=auto", "dp=6"))
    assert main(["launch", str(job), "--nodes", "2"]) == 2
    assert "dp=6" in capsys.readouterr().err
    job.write_text(JOB.replace("save_every = 100", ""))
    assert main(["launch", str(job)]) == 2
    assert "train.save_every = 0" in capsys.readouterr().err


# ---- Slurm: the script itself, with stand-ins for Slurm and torchrun -------------------------------------------------

PROGRAMS = {
    "srun": '#!/bin/bash\nshift\nexec "$@"\n',
    "scontrol": '#!/bin/bash\necho "$@" >> $LOG\n[ "$1" = show ] && echo node-1\nexit 0\n',
    "torchrun": """#!/bin/bash
echo torchrun "$@" >> $LOG
[[ "$*" = *doctor* ]] && exit $DOCTOR
for _ in $(seq 100); do [ -e runs/demo/stop ] && exit 0; sleep 0.05; done
exit 7
""",
}


def run_script(folder: Path, text: str, *, doctor: int, signalled: bool) -> tuple[int, str]:
    """Return the exit status of the sbatch script, and the calls that it made."""
    (folder / "runs" / "demo").mkdir(parents=True, exist_ok=True)
    for name, program in PROGRAMS.items():
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)
    log = folder / "log"
    log.write_text("")
    path = f"{folder}:{os.environ['PATH']}"
    environment = {"PATH": path, "LOG": str(log), "DOCTOR": str(doctor), "SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n"}
    script = subprocess.Popen(["bash", "-c", text], env=environment)
    if signalled:
        while "meshwise train" not in log.read_text():
            time.sleep(0.02)
        script.send_signal(signal.SIGUSR1)
    return script.wait(timeout=30), log.read_text()


def test_the_script_of_slurm_saves_before_its_time_is_over_and_is_queued_again(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = recipe(job, capsys, "--nodes", "2", "--folder", str(tmp_path))
    status, calls = run_script(tmp_path, text, doctor=0, signalled=True)
    assert status == 0
    train = next(line for line in calls.splitlines() if "meshwise train" in line)
    assert "--nnodes=2 --nproc-per-node=8" in train
    assert "--rdzv-endpoint=node-1:29400 --rdzv-id 5 --max-restarts=3 -m meshwise train demo.toml" in train
    assert calls.endswith("requeue 5\n")


def test_a_run_that_fails_is_not_queued_again_and_a_sick_node_starts_none(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = recipe(job, capsys, "--folder", str(tmp_path))
    status, calls = run_script(tmp_path, text, doctor=1, signalled=False)
    assert status == 1
    assert "meshwise train" not in calls
    status, calls = run_script(tmp_path, text, doctor=0, signalled=False)
    assert status == 7
    assert "requeue" not in calls


# ---- the others: by the library that reads them ----------------------------------------------------------------------


def check_keys(value: Any, kind: str, models: Any) -> None:
    """Check that a manifest has only keys that the models of the Kubernetes client know, all the way down."""
    kind = re.sub(r"^(List|Dict)(?=[\[(])", lambda found: found[1].lower(), kind)
    if kind.startswith("list["):
        for item in value:
            check_keys(item, kind[5:-1], models)
    elif kind.startswith(("dict(", "dict[")):
        assert isinstance(value, dict)
    elif kind in ("str", "int", "bool", "object"):
        assert kind == "object" or isinstance(value, {"str": str, "int": int, "bool": bool}[kind]), (value, kind)
    else:
        model = getattr(models, kind)
        names = {key: name for name, key in model.attribute_map.items()}
        assert value.keys() <= names.keys(), f"{kind} has no {sorted(value.keys() - names.keys())}"
        for key, item in value.items():
            check_keys(item, model.openapi_types[names[key]], models)
        model(**{names[key]: item for key, item in value.items()})  # raises for a key that is required


def test_the_manifest_of_kubernetes_has_the_keys_of_its_api(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = pytest.importorskip("kubernetes.client", reason="the client of Kubernetes is not installed")
    yaml = pytest.importorskip("yaml", reason="a YAML parser is not installed")
    manifest = yaml.safe_load(recipe(job, capsys, "--for", "kubernetes", "--nodes", "8"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    [node] = manifest["spec"]["replicatedJobs"]
    check_keys(node["template"], "V1JobTemplateSpec", client)
    pod = node["template"]["spec"]["template"]["spec"]
    assert node["template"]["spec"]["completions"] == 8
    assert subprocess.run(["bash", "-nc", pod["containers"][0]["args"][0]], check=False).returncode == 0


def test_the_job_of_sagemaker_fits_the_call_that_creates_it(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request: Mapping[str, Any] = json.loads(recipe(job, capsys, "--for", "sagemaker", "--nodes", "8"))
    [program] = request["AlgorithmSpecification"]["ContainerArguments"]
    assert subprocess.run(["bash", "-nc", program], check=False).returncode == 0
    session = pytest.importorskip("botocore.session", reason="botocore is not installed").Session()
    validator = pytest.importorskip("botocore.validate").ParamValidator()
    model = session.get_service_model("sagemaker").operation_model("CreateTrainingJob")
    report = validator.validate(request, model.input_shape)
    assert not report.has_errors(), report.generate_report()


@pytest.mark.filterwarnings("ignore")  # of the libraries that azure-ai-ml imports
def test_the_job_of_azure_is_read_by_its_library(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ml = pytest.importorskip("azure.ai.ml", reason="azure-ai-ml is not installed")
    Path("job.yaml").write_text(recipe(job, capsys, "--for", "azureml", "--nodes", "8"))
    read = ml.load_job("job.yaml")
    assert read.resources.instance_count == 8
    assert read.distribution.process_count_per_instance == 8
    assert read.limits.timeout == 86400
    program = read.command.replace("${{outputs.shared}}", "/shared")
    assert subprocess.run(["bash", "-nc", program], check=False).returncode == 0


def test_slurm_itself_accepts_the_file(job: Path) -> None:
    """Where a Slurm with two free nodes of 8 GPUs answers: tests/cli/local_slurm.sh starts one."""
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        pytest.skip("no Slurm answers")

    def checked(*words: str) -> subprocess.CompletedProcess[str]:
        assert main(["launch", str(job), "--for", "slurm", "--write", "demo.sbatch", *words]) == 0
        return subprocess.run(
            ["sbatch", "--test-only", "demo.sbatch"], capture_output=True, text=True, check=False, timeout=30
        )

    assert checked("--nodes", "2").returncode == 0
    assert "Requested node configuration is not available" in checked("--nodes", "20").stderr


def test_the_script_of_ray_is_python(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [node.id for node in ast.walk(ast.parse(recipe(job, capsys, "--for", "ray"))) if isinstance(node, ast.Name)]
    assert "TorchTrainer" in names
