"""`rljob.io/v1alpha1`: the single source of the CRD, its documentation and the resolved job."""

from rljob_api.v1alpha1.algorithm import *  # noqa: F403
from rljob_api.v1alpha1.base import ApiModel, StrEnum
from rljob_api.v1alpha1.cluster import *  # noqa: F403
from rljob_api.v1alpha1.data import *  # noqa: F403
from rljob_api.v1alpha1.model import *  # noqa: F403
from rljob_api.v1alpha1.rollout import *  # noqa: F403
from rljob_api.v1alpha1.spec import API_VERSION, GROUP, KIND, PLURAL, VERSION, RLJob, RLJobSpec
from rljob_api.v1alpha1.status import *  # noqa: F403

__all__ = ["API_VERSION", "GROUP", "KIND", "PLURAL", "VERSION", "ApiModel", "RLJob", "RLJobSpec", "StrEnum"]
