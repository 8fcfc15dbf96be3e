import types

import numpy as np
import pytest
from sklearn.callback import ProgressBar
from sklearn.model_selection import GridSearchCV

import onelayer as ol
from onelayer import inputs
from onelayer.features import progress
from onelayer.features.kernels.attention import AttentionKernel
from onelayer.features.solvers import design as design_module
from onelayer.features.solvers import ridge

X = inputs.sphere(30, 3, 2)
Y = X[:, 1, 0]


def recorder():
    """A callback for fits, and the list of (hook, path of task names) that it is told.

    It follows scikit-learn's protocol `FitCallback`; the names go from the root to the task.
    """
    told = []

    def hook(name):
        def tell(estimator, context):
            told.append((name, path_of(context)))

        return tell

    hooks = ("setup", "on_fit_task_begin", "on_fit_task_end", "teardown")
    return types.SimpleNamespace(**{name: hook(name) for name in hooks}), told


def path_of(context):
    above = () if context.parent is None else path_of(context.parent)
    return (*above, context.task_name)


def stages(told):
    """The stages in the order in which they began."""
    return [path[1] for hook, path in told if hook == "on_fit_task_begin" and len(path) == 2]


def parts(told, stage):
    """How many parts of a stage have ended."""
    return sum(hook == "on_fit_task_end" and path[1:] == (stage, "part") for hook, path in told)


def check_nesting(told, root):
    """Set up first, torn down last; what began last ends first, and below what has begun."""
    assert told[0] == ("setup", (root,))
    assert told[-1] == ("teardown", (root,))
    under_way = []
    for hook, path in told[1:-1]:
        if hook == "on_fit_task_begin":
            assert path[:-1] in ((), *under_way)
            under_way.append(path)
        else:
            assert hook == "on_fit_task_end"
            assert under_way.pop() == path
    assert under_way == []
    assert told[1] == ("on_fit_task_begin", (root,))
    assert told[-2] == ("on_fit_task_end", (root,))


def attention(**options):
    return ol.RandomFeatureAttention(**{"heads": 20, "alpha": 1e-3, "random_state": 0, **options})


def test_every_stage_and_part_of_a_fit_is_told(monkeypatch):
    monkeypatch.setattr(design_module, "PANEL_BYTES", 8 * 30 * 3 * 6)  # six heads
    callback, told = recorder()
    attention().set_callbacks(callback).fit(X, Y)
    check_nesting(told, "fit")
    assert stages(told) == ["Gram matrix", "weights"]
    assert parts(told, "Gram matrix") == parts(told, "weights") == 4


def test_more_examples_than_features_are_told_by_rows(monkeypatch):
    monkeypatch.setattr(design_module, "PANEL_BYTES", 8 * 6 * 10)  # ten examples
    callback, told = recorder()
    attention(heads=2).set_callbacks(callback).fit(X, Y)
    check_nesting(told, "fit")
    assert stages(told) == ["Gram matrix"]
    assert parts(told, "Gram matrix") == 3


def test_another_way_through_the_examples_is_told():
    callback, told = recorder()
    attention(heads=2, alpha="loo").set_callbacks(callback).fit(X, Y)
    check_nesting(told, "fit")
    assert stages(told) == ["Gram matrix", "left out"]


def test_rounds_of_corrections_are_told(monkeypatch):
    monkeypatch.setattr(ridge, "_MIXED_FROM", 0)
    callback, told = recorder()
    attention().set_callbacks(callback).fit(X, Y)
    check_nesting(told, "fit")
    assert stages(told)[:2] == ["Gram matrix", "correction"]


def test_tiles_of_a_kernel_are_told():
    callback, told = recorder()
    ol.AttentionKernelRidge().set_callbacks(callback).fit(X, Y)
    check_nesting(told, "fit")
    assert stages(told) == ["kernel"]
    assert parts(told, "kernel") == 1


def test_a_classifier_and_a_network_tell_too():
    for model in (
        ol.RandomFeatureAttentionClassifier(heads=2),
        ol.RandomFeatureMLP(features=50),
    ):
        callback, told = recorder()
        model.set_callbacks(callback).fit(X, np.where(Y > 0, 1, 0))
        check_nesting(told, "fit")


def test_a_learning_curve_is_told_by_its_own_name():
    callback, told = recorder()
    model = attention(heads=5).set_callbacks(callback)
    ol.learning_curve(model, X, Y, X, Y, [5, 20, 30])
    check_nesting(told, "learning curve")
    assert stages(told) == ["Gram matrix", "weights", "Gram matrix"]


def test_nobody_need_listen():
    model, callback = attention(), recorder()[0]
    expected = attention().set_callbacks(callback).fit(X, Y).coef_
    np.testing.assert_array_equal(model.fit(X, Y).coef_, expected)


def test_a_fit_that_raises_is_torn_down_without_an_end(monkeypatch):
    def solve(*arguments):
        raise MemoryError("no more")

    monkeypatch.setattr(ridge, "solve_kernel", solve)
    callback, told = recorder()
    with pytest.raises(MemoryError, match="no more"):
        attention().set_callbacks(callback).fit(X, Y)
    assert told[-1] == ("teardown", ("fit",))
    assert ("on_fit_task_end", ("fit", "Gram matrix")) in told
    assert ("on_fit_task_end", ("fit",)) not in told


def test_a_stage_that_raises_is_torn_down(monkeypatch):
    def block(*arguments):
        raise MemoryError("no more")

    monkeypatch.setattr(AttentionKernel, "block", block)
    callback, told = recorder()
    with pytest.raises(MemoryError, match="no more"):
        ol.AttentionKernelRidge().set_callbacks(callback).fit(X, Y)
    assert [hook for hook, _ in told] == ["setup"] + 3 * ["on_fit_task_begin"] + ["teardown"]


def test_what_is_refused_at_the_door_is_not_told():
    callback, told = recorder()
    with pytest.raises(ValueError, match="alpha is -1"):
        attention(alpha=-1).set_callbacks(callback).fit(X, Y)
    assert told == []


def test_a_refit_tells_again():
    callback, told = recorder()
    model = attention().set_callbacks(callback).fit(X, Y)
    once = list(told)
    model.fit(X, Y)
    assert told == 2 * once


# scikit-learn's own bar


def test_progress_bar_shows_a_fit(capsys):
    attention().set_callbacks(ProgressBar()).fit(X, Y)
    shown = capsys.readouterr().out
    for line in ("RandomFeatureAttention - fit", "Gram matrix #0", "weights #1"):
        assert line in shown
    assert shown.count("100%") == 3


def test_progress_bar_shows_a_learning_curve(capsys):
    model = ol.RandomFeatureMLP(features=20, alpha=1e-3).set_callbacks(ProgressBar())
    ol.learning_curve(model, X, Y, X, Y, [5, 30])
    shown = capsys.readouterr().out
    assert "RandomFeatureMLP - learning curve" in shown
    assert shown.count("100%") == 4


def test_progress_bar_of_a_search_shows_its_fits(capsys):
    search = GridSearchCV(attention(heads=2), {"alpha": [0.1, 1.0]}, cv=2, refit=False)
    search.set_callbacks(ProgressBar(max_propagation_depth=None)).fit(X, Y)
    shown = capsys.readouterr().out
    assert shown.count("RandomFeatureAttention - fit") == 4
    assert "Gram matrix" in shown


def test_steps_are_told_by_calls():
    told = []

    def track(parts, stage):
        for part in parts:
            told.append(f"{stage} {part} begins")
            yield part
            told.append(f"{stage} {part} ends")

    done = progress.ticking(track, 2, "step")
    assert told == ["step 0 begins"]
    done(0.5)
    assert told[1:] == ["step 0 ends", "step 1 begins"]
    done(1.0)
    done(1.0)
    assert told[3:] == ["step 1 ends"]


def test_nobody_watches_unless_asked():
    assert list(progress.untracked([1, 2], "stage")) == [1, 2]
