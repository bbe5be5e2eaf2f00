"""The part of KubeRay's API (ray.io/v1, KubeRay 1.5) that the cluster files use, kept by hand: the operator's own schema needs a cluster.

Field names, required fields and types are those of the custom resources; below them stand the rules that the operator checks besides.
What Kubernetes has beyond these fields is refused here, so a file that uses more of it adds to these classes.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|[kMGT]i?)?")
_FACTORS = {None: 1.0, "m": 1e-3} | {f"{k}{i}": base**n for i, base in (("", 1e3), ("i", 1024.0)) for n, k in enumerate("kMGT", 1)}

Name = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=50)]  # KubeRay adds to it, up to 63
LabelKey = Annotated[str, StringConstraints(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")]
Labels = dict[LabelKey, LabelValue]


def amount(quantity: str) -> float:
    """The number that a Kubernetes quantity such as `512Mi` stands for."""
    matched = _QUANTITY.fullmatch(quantity)
    if matched is None:
        raise ValueError(f"expected a quantity such as 2, 500m or 6Gi, got {quantity!r}")
    return float(matched[1]) * _FACTORS[matched[2]]


class _Part(BaseModel):
    """What knows no other fields than its own, and converts nothing: a number is no string."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(_Part):
    name: Name
    labels: Labels = {}


class TemplateMetadata(_Part):
    labels: Labels = {}


class Resources(_Part):
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, quantity in (self.requests | self.limits).items():
            amount(quantity)
            if name in self.requests and name in self.limits and amount(self.requests[name]) > amount(self.limits[name]):
                raise ValueError(f"{name}: the request is above the limit")
        if self.requests.get("nvidia.com/gpu") != self.limits.get("nvidia.com/gpu"):
            raise ValueError("nvidia.com/gpu: request and limit must be equal")
        return self


class VolumeMount(_Part):
    name: Name
    mountPath: str  # noqa: N815  # Kubernetes' names


class Container(_Part):
    name: Name
    image: str
    resources: Resources = Resources()
    volumeMounts: list[VolumeMount] = []  # noqa: N815


class Claim(_Part):
    claimName: Name  # noqa: N815


class Empty(_Part):
    medium: Literal["", "Memory"] = ""


class Volume(_Part):
    name: Name
    emptyDir: Empty | None = None  # noqa: N815
    persistentVolumeClaim: Claim | None = None  # noqa: N815

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.emptyDir is None) == (self.persistentVolumeClaim is None):
            raise ValueError("a volume has one source")
        return self


class PodSpec(_Part):
    containers: list[Container] = Field(min_length=1)
    nodeSelector: Labels = {}  # noqa: N815
    volumes: list[Volume] = []

    @model_validator(mode="after")
    def _mounts_are_volumes(self) -> Self:
        names = {volume.name for volume in self.volumes}
        for container in self.containers:
            for mount in container.volumeMounts:
                if mount.name not in names:
                    raise ValueError(f"container {container.name} mounts {mount.name}, which is no volume of the pod")
        return self


class Template(_Part):
    metadata: TemplateMetadata = TemplateMetadata()
    spec: PodSpec


class Group(_Part):
    """What the head and the workers have in common."""

    labels: Labels = {}
    rayStartParams: dict[str, str]  # noqa: N815
    template: Template

    @field_validator("labels")
    @classmethod
    def _not_rays(cls, labels: dict[str, str]) -> dict[str, str]:
        if reserved := [key for key in labels if key.startswith("ray.io/node")]:
            raise ValueError(f"{reserved[0]} is Ray's own")
        return labels

    @field_validator("rayStartParams")
    @classmethod
    def _no_labels(cls, params: dict[str, str]) -> dict[str, str]:
        if "labels" in params:
            raise ValueError("the operator refuses rayStartParams.labels; use the group's labels")
        return params

    @property
    def resources(self) -> Resources:
        """Of the Ray container, which is the first."""
        return self.template.spec.containers[0].resources


class Worker(Group):
    groupName: Name  # noqa: N815
    replicas: int = Field(ge=0)
    minReplicas: int = Field(ge=0)  # noqa: N815
    maxReplicas: int = Field(ge=0)  # noqa: N815

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.minReplicas <= self.replicas <= self.maxReplicas:
            raise ValueError("expected minReplicas <= replicas <= maxReplicas")
        return self


class ClusterSpec(_Part):
    rayVersion: str  # noqa: N815
    headGroupSpec: Group  # noqa: N815
    workerGroupSpecs: list[Worker] = []  # noqa: N815

    @model_validator(mode="after")
    def _unique_groups(self) -> Self:
        names = [group.groupName for group in self.workerGroupSpecs]
        if len(set(names)) < len(names):
            raise ValueError(f"two worker groups have one name: {names}")
        return self


class JobSpec(_Part):
    entrypoint: str = Field(min_length=1)
    clusterSelector: Labels = {}  # noqa: N815
    rayClusterSpec: ClusterSpec | None = None  # noqa: N815
    shutdownAfterJobFinishes: bool = False  # noqa: N815
    ttlSecondsAfterFinished: int = Field(0, ge=0)  # noqa: N815
    submissionMode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode"] = "K8sJobMode"  # noqa: N815
    runtimeEnvYAML: str = ""  # noqa: N815

    @model_validator(mode="after")
    def _one_cluster(self) -> Self:
        if (self.rayClusterSpec is None) == (not self.clusterSelector):
            raise ValueError("a job has either a clusterSelector or a rayClusterSpec")
        if self.clusterSelector and self.shutdownAfterJobFinishes:
            raise ValueError("a job does not shut a cluster down that it only selects")
        if self.ttlSecondsAfterFinished and not self.shutdownAfterJobFinishes:
            raise ValueError("ttlSecondsAfterFinished needs shutdownAfterJobFinishes")
        return self


class RayCluster(_Part):
    apiVersion: Literal["ray.io/v1"]  # noqa: N815
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: ClusterSpec


class RayJob(_Part):
    apiVersion: Literal["ray.io/v1"]  # noqa: N815
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: JobSpec


def read(text: str) -> RayCluster | RayJob:
    """The resource that a YAML document describes.

    Raises:
        ValueError: it is no valid RayCluster or RayJob.
    """
    content: Any = yaml.safe_load(text)
    match content["kind"]:
        case "RayCluster":
            return RayCluster.model_validate(content)
        case "RayJob":
            return RayJob.model_validate(content)
        case other:
            raise ValueError(f"expected a RayCluster or a RayJob, got {other}")
