from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_wine, make_friedman1
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import estimator_checks_generator

from lightning_methods.modern_nca import ModernNCAClassifier, ModernNCARegressor

SMALL = {"dim": 16, "n_frequencies": 8, "d_embedding": 8, "max_epochs": 30, "patience": 10}


@pytest.mark.bad_input
@pytest.mark.parametrize("kind", [ModernNCAClassifier, ModernNCARegressor])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_checks(kind):
    failed = {}
    names = []
    for estimator, check in estimator_checks_generator(kind(**{**SMALL, "max_epochs": 12, "patience": 5}), mark=None):
        name = check.func.__name__
        names.append(name)
        try:
            check(estimator)
        except Exception as error:
            if type(error).__name__ != "SkipTest":
                failed[name] = repr(error)[:300]
    assert not failed
    assert len(names) >= 50


def table(n: int = 160):
    generator = np.random.default_rng(0)
    numbers = generator.normal(size=(n, 2))
    letters = generator.choice(["a", "b", "c"], n)
    y = np.where((letters == "a") ^ (numbers[:, 0] > 0), "yes", "no")
    return numbers, letters, y


@pytest.fixture(scope="module")
def wine():
    X, y = load_wine(return_X_y=True)
    names = np.array(["red", "white", "rose"])[y]
    return X[::2], names[::2], X[1::2], names[1::2]


def test_classifier(wine):
    X, y, test_X, test_y = wine
    model = ModernNCAClassifier(**SMALL, random_state=0).fit(X, y)
    assert model.score(test_X, test_y) > 0.9
    assert model.classes_.tolist() == ["red", "rose", "white"]
    probabilities = model.predict_proba(test_X)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-12)
    assert (model.classes_[probabilities.argmax(axis=1)] == model.predict(test_X)).all()
    assert 10 < model.n_iter_ <= 30
    assert len(model.validation_scores_) == model.n_iter_
    assert model.n_features_in_ == 13
    assert model.embed(test_X).shape == (len(test_X), 16)


def test_the_best_epoch_is_kept_and_a_stalled_fit_ends(wine):
    X, y, *_ = wine
    model = ModernNCAClassifier(**{**SMALL, "patience": 3, "max_epochs": 200}, random_state=1).fit(X, y)
    scores = np.array(model.validation_scores_)
    best = scores.max()
    assert model.n_iter_ < 200
    assert len(scores) - 1 - int(np.argmax(scores == best)) == 3
    whole = ModernNCAClassifier(**SMALL, early_stopping=False, random_state=1).fit(X, y)
    assert whole.n_iter_ == 30
    assert whole.validation_scores_ == []


def test_all_rows_are_neighbours_in_the_end(wine):
    X, y, test_X, _ = wine
    model = ModernNCAClassifier(**SMALL, random_state=0).fit(X, y)
    assert len(model.module_.candidate_x) == len(X)
    weights, indices = model.kneighbors(test_X, 4)
    assert indices.shape == (len(test_X), 4)
    assert (np.diff(weights, axis=1) <= 0).all()
    everything, order = model.kneighbors(test_X, len(X))
    mass = np.stack([np.where(y[order] == name, everything, 0).sum(axis=1) for name in model.classes_], axis=1)
    np.testing.assert_allclose(mass, model.predict_proba(test_X), atol=1e-6)
    assert (model.kneighbors(X[:5], 1)[1][:, 0] == np.arange(5)).all()


def test_regressor_in_its_own_unit():
    X, y = make_friedman1(400, random_state=0)
    model = ModernNCARegressor(**SMALL, random_state=0).fit(X[:300], 100 + 10 * y[:300])
    assert model.score(X[300:], 100 + 10 * y[300:]) > 0.7
    assert model.validation_scores_[-1] > 5  # in the target's unit


def test_random_state_decides_and_global_generators_are_left_alone(wine):
    X, y, test_X, _ = wine
    torch.manual_seed(5), np.random.seed(5)  # noqa: NPY002
    os.environ["PL_GLOBAL_SEED"] = "7"
    try:
        before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        first = ModernNCAClassifier(**SMALL, n_blocks=1, random_state=0).fit(X, y)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
        assert os.environ["PL_GLOBAL_SEED"] == "7"
    finally:
        del os.environ["PL_GLOBAL_SEED"]
    torch.manual_seed(6)
    again = clone(first).fit(X, y)
    np.testing.assert_array_equal(first.predict_proba(test_X), again.predict_proba(test_X))
    other = clone(first).set_params(random_state=1).fit(X, y)
    assert not np.array_equal(first.predict_proba(test_X), other.predict_proba(test_X))


def test_it_is_quiet(wine, capfd):
    X, y, *_ = wine
    ModernNCAClassifier(**{**SMALL, "max_epochs": 2}).fit(X, y)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_pickle(wine):
    X, y, test_X, _ = wine
    model = ModernNCAClassifier(**{**SMALL, "max_epochs": 3}, random_state=0).fit(X, y)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(test_X), model.predict_proba(test_X))


def test_pipeline_and_grid_search(wine):
    X, y, test_X, _ = wine
    pipeline = make_pipeline(FunctionTransformer(np.log1p), ModernNCAClassifier(**{**SMALL, "max_epochs": 5}))
    search = GridSearchCV(pipeline, {"modernncaclassifier__temperature": [0.5, 1.0]}, cv=2).fit(X, y)
    assert search.predict(test_X).shape == (len(test_X),)


@pytest.mark.parametrize("chosen", [[2], [-1], [False, False, True]])
def test_categories_in_an_array(chosen):
    numbers, letters, y = table()
    X = np.empty((len(y), 3), dtype=object)
    X[:, :2], X[:, 2] = numbers, letters
    X[3, 1], X[4, 2] = np.nan, None
    model = ModernNCAClassifier(**SMALL, categorical_features=chosen, random_state=0).fit(X[:120], y[:120])
    assert model.preprocessor_.d_num == 2
    assert 3 <= model.preprocessor_.d_cat <= 4
    assert model.score(X[120:], y[120:]) > 0.75
    without = ModernNCAClassifier(**SMALL, random_state=0).fit(numbers[:120], y[:120])
    assert without.score(numbers[120:], y[120:]) < model.score(X[120:], y[120:])


def test_categories_in_a_data_frame():
    pandas = pytest.importorskip("pandas")
    numbers, letters, y = table()
    frame = pandas.DataFrame({"u": numbers[:, 0], "letter": letters, "v": numbers[:, 1]})
    model = ModernNCAClassifier(**SMALL, categorical_features=["letter"], random_state=0).fit(frame, y)
    assert model.feature_names_in_.tolist() == ["u", "letter", "v"]
    assert model.score(frame, y) > 0.9
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["letter", "u", "v"]])
    with pytest.raises(ValueError, match="no column 'w'"):
        ModernNCAClassifier(categorical_features=["w"]).fit(frame, y)


def test_a_missing_value_does_not_rename_the_categories_of_a_column():
    """Integers become floats in a data frame as soon as one is missing."""
    pandas = pytest.importorskip("pandas")
    numbers, letters, y = table()
    frame = pandas.DataFrame({"u": numbers[:, 0], "letter": letters, "code": np.arange(len(y)) % 4})
    model = ModernNCAClassifier(**{**SMALL, "max_epochs": 2}, categorical_features=["letter", "code"], random_state=0)
    wanted = model.fit(frame, y).predict_proba(frame)
    missing = frame.assign(code=frame.code.astype(float).where(frame.index > 0))
    np.testing.assert_allclose(model.predict_proba(missing)[1:], wanted[1:])
    nullable = frame.assign(u=frame.u.astype("Float64"), code=frame.code.astype("Int64"))
    nullable.loc[0, ["u", "code"]] = pandas.NA
    np.testing.assert_allclose(model.predict_proba(nullable)[1:], wanted[1:])


def test_tiny_and_odd_tables():
    X, y = np.arange(6.0)[:, None], np.array([0, 0, 0, 1, 1, 1])
    model = ModernNCAClassifier(**SMALL, random_state=0).fit(X, y)
    assert model.predict(X).shape == (6,)
    rare = np.array([0, 0, 0, 1, 1, 2])  # a class of one row cannot be in both parts
    assert ModernNCAClassifier(**SMALL, random_state=0).fit(X, rare).predict_proba(X).shape == (6, 3)
    assert ModernNCAClassifier(**SMALL, batch_size=5).fit(X, y).predict(X).shape == (6,)  # 6 rows in batches of 5
    constant = ModernNCARegressor(**SMALL).fit(X, np.full(6, 3.0))
    np.testing.assert_allclose(constant.predict(X), 3.0)
    one_class = ModernNCAClassifier(**SMALL).fit(X, np.zeros(6))
    np.testing.assert_array_equal(one_class.predict_proba(X), np.ones((6, 1)))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"batch_size": 1}, "batch_size"),
        ({"max_epochs": 0}, "max_epochs"),
        ({"patience": 0}, "patience"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"temperature": 0.0}, "temperature"),
        ({"sample_rate": 2.0}, "sample_rate"),
        ({"categorical_features": [7]}, "0..1"),
        ({"categorical_features": [True]}, "1 flags for 2 columns"),
    ],
)
def test_bad_parameters(parameters, message):
    with pytest.raises(ValueError, match=message):
        ModernNCAClassifier(**{**SMALL, **parameters}).fit(
            np.random.default_rng(0).normal(size=(9, 2)), np.arange(9) % 2
        )
