"""What all tests share: the backends, and how hypothesis draws its examples."""

import os

# Without it scikit-learn skips its checks of estimators on torch tensors; scipy reads it only once,
# when it is imported, so it comes before all other imports.
os.environ.setdefault("SCIPY_ARRAY_API", "1")

import hypothesis
import pytest

# Derandomised: the same examples on every machine, so that a failure can be repeated.
hypothesis.settings.register_profile("onelayer", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("onelayer")

BACKENDS = ["numpy", "torch", "array_api_strict"]


@pytest.fixture(scope="session", params=BACKENDS)
def xp_array(request):
    """A function that turns a numpy array into an array of the backend; dtypes are kept.

    It has the scope of the session only because hypothesis asks for it: it keeps no state.
    """
    return pytest.importorskip(request.param).asarray
