"""What all tests share: the backends, a Dask cluster, and how hypothesis draws its examples."""

import logging
import os
import signal

# Without it scikit-learn skips its checks of estimators on torch tensors; scipy reads it only once,
# when it is imported, so it comes before all other imports.
os.environ.setdefault("SCIPY_ARRAY_API", "1")
os.environ.setdefault("COLUMNS", "200")  # read by the consoles of the command line, when imported

import hypothesis
import pytest

# A shell that runs tests in the background has them ignore Ctrl-C, and all that they start too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Derandomised: the same examples on every machine, so that a failure can be repeated.
hypothesis.settings.register_profile("onelayer", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("onelayer")


def pytest_collection_modifyitems(items):
    """Run all modules that use the cluster in one process: they share it, and what it computes."""
    on_cluster = {
        item.path
        for item in items
        # Tests that take the place of examples as a parameter ask for the cluster when they run.
        if "local_cluster" in item.fixturenames or "cluster" in item.name
    }
    for item in items:
        if item.path in on_cluster:
            item.add_marker(pytest.mark.xdist_group("cluster"))
        if "local_cluster" in item.fixturenames or "cluster" in item.name:
            item.add_marker(pytest.mark.slow)


BACKENDS = ["numpy", "torch", "array_api_strict"]


@pytest.fixture(scope="session", params=BACKENDS)
def xp_array(request):
    """A function that turns a numpy array into an array of the backend; dtypes are kept.

    It has the scope of the session only because hypothesis asks for it: it keeps no state.
    """
    return pytest.importorskip(request.param).asarray


@pytest.fixture(scope="session")
def local_cluster(tmp_path_factory, request):
    """A Dask cluster of two processes with a thread each, started when a test first asks for it.

    They inherit the path of this process, by which they find the functions of test files.
    """
    distributed = pytest.importorskip("distributed")
    import dask

    # Workers look at their own stacks a hundred times a second otherwise, busy or not.
    quiet = {"distributed.worker.profile.enabled": False}
    with pytest.MonkeyPatch.context() as patch, dask.config.set(quiet):
        patch.syspath_prepend(request.config.rootpath)
        with distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            dashboard_address=":0",  # any port: others may run tests on this machine too
            local_directory=str(tmp_path_factory.mktemp("dask")),
            silence_logs=logging.ERROR,
        ) as found:
            yield found


@pytest.fixture
def cluster(local_cluster):
    """A client of the cluster, the one in use while the test lasts; workers that died are back."""
    from distributed import Client

    with Client(local_cluster) as client:
        client.wait_for_workers(2, timeout=30)
        yield client
