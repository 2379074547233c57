"""The recipes in docs/cluster: what a cluster would refuse is refused here."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("verl.protocol")
validate = pytest.importorskip("kubernetes_validate").validate

import yaml

from lightning_trainer.config.train import TrainConfig

CLUSTER = Path(__file__).parents[2] / "docs" / "cluster"
KUBERNETES = "1.31"
DOCUMENTS = {document["kind"]: document for document in yaml.safe_load_all((CLUSTER / "rayjob.yaml").read_text())}


@pytest.mark.parametrize("kind", ["PersistentVolumeClaim", "ConfigMap", "Service", "Deployment"])
def test_kubernetes_accepts_each_document(kind):
    validate(DOCUMENTS[kind], KUBERNETES, strict=True)


def test_kubernetes_accepts_the_pods_of_the_ray_job():
    cluster = DOCUMENTS["RayJob"]["spec"]["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        template = group["template"]
        metadata = {"name": "pod", **template.get("metadata", {})}
        validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}, KUBERNETES, strict=True
        )


def test_the_run_in_the_manifest_is_one_that_we_accept_and_fits_its_cluster():
    config = TrainConfig(**tomllib.loads(DOCUMENTS["ConfigMap"]["data"]["run.toml"]))
    cluster = DOCUMENTS["RayJob"]["spec"]["rayClusterSpec"]
    workers = sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    assert config.nodes == 1 + workers
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(config.gpus)
    assert DOCUMENTS["Service"]["spec"]["ports"][0]["port"] == config.port


def test_the_slurm_script_is_one_that_bash_can_read():
    subprocess.run(["bash", "-n", str(CLUSTER / "slurm.sh")], check=True)
