"""The names, order and defaults of arguments that users write."""

import inspect
import pydoc
import re

import pytest

import bnuq_ext as bnuq

NARROW = "std2=0.0024787521766663585"  # e^-6
PRIOR = "prior=GaussianPrior(std=1.0)"
NORM = "weight=None, bias=None, eps=1e-05, residual=None, activation='none', slope=0.01, shared=False, out=None"
SIGNATURES = {
    "Bank": "mean, var, count, *, batch_size, dataset_size=None, disjoint=1.0, unused=(), metadata=None",
    "BayesLinear": f"in_features, out_features, bias=True, *, {PRIOR}, mu_init=None, rho_init=-5.0, "
    "estimator='exact', device=None, dtype=None",
    "GaussianPrior": "std=1.0",
    "Prediction": "likelihood, num_samples, mean, variance, noise_var=None, entropy=None, "
    "mutual_information=None, samples=None, snapshots=None, targets=None",
    "Prediction.from_samples": "samples, likelihood, noise_var=None",
    "ScaleMixturePrior": f"pi=0.5, std1=1.0, {NARROW}",
    "analytic_statistics": "x, batch_size, dataset_size=None",
    "attach": "model, bank",
    "collect": "model, data, num_batches=64, *, batch_size=None, device=None, input_fn=None, progress=True, "
    "on_nonfinite='raise'",
    "convert": "model, *, inplace=False, strict=True, filter_fn=None",
    "doctor": "model, x",
    "elbo_loss": "model, x, y, *, num_samples=1, likelihood='categorical', batch_weight=None, "
    "dataset_size=None, noise_std=1.0, reduction='mean', seed=None, output_fn=None",
    "ensemble": "models, x, *, likelihood, num_samples=None, seed=None, sampler=None, noise_var=None, "
    "first_replica=0, batch_size=None, strategy='auto', chunk='auto', output_fn=None, keep_samples=False, "
    "progress=False",
    "fit_batch_size": "model, data, candidates, *, likelihood, prior=None, validation=None, num_samples=32, "
    "noise_var=None, num_rows=None, seed=None, rows_at_a_time=256, output_fn=None, progress=True",
    "freeze": "model, *, statistics=True, affine=True",
    "implied_prior": "l2, dataset_size, tau=1.0",
    "kl_divergence": "model, num_samples=1, seed=None",
    "kl_weight": "i, num_batches, scheme='uniform'",
    "mc_dropout": "model, x, *, likelihood, num_samples=32, seed=None, sampler=None, noise_var=None, "
    "first_replica=0, batch_size=None, output_fn=None, keep_samples=False, progress=False",
    "ops.batch_norm_bank": f"x, mean, var, seed=None, snapshot=None, *, num_samples=None, {NORM}",
    "ops.batch_norm_fitted": f"x, params, seed, stream, num_samples, family, *, {NORM}",
    "ops.bayes_linear": "x, mu, rho, bias_mu=None, bias_rho=None, *, seed, stream, num_samples",
    "ops.gaussian_kl": "mu, rho, prior_std=1.0",
    "ops.mixture_kl": f"mu, rho, seed, stream, num_samples=1, *, pi=0.5, std1=1.0, {NARROW}",
    "ops.new_seed": "seed=None, first_replica=0, device='cpu'",
    "ops.philox_normal": "seed, stream, shape, *, tag=None",
    "ops.predictive_accumulate_": "mean, m2, expected_entropy, logits, count",
    "ops.predictive_statistics": "logits",
    "ops.snapshot_indices": "seed, num_snapshots, num_samples",
    "plug_in": "model, x, *, likelihood, noise_var=None, output_fn=None, keep_samples=False, progress=False",
    "posterior_summary": "model",
    "predict": "model, x, *, likelihood, num_samples=32, sampler='bank', seed=None, noise_var=None, "
    "first_replica=0, loader=None, batch_size=None, query='out', strategy='auto', chunk='auto', "
    "output_fn=None, keep_samples=False, progress=False",
    "prune": "model, fraction, by='snr'",
    "register_adapter": "cls_or_qualified_name, fn",
    "replicas": "model, num_samples, seed=None, *, sampler='bank', first_replica=0, batch_size=None",
    "revert": "model, *, inplace=False",
    "statistics_kl": "q, prior",
    "statistics_normality": "model, data, batch_size, *, num_batches=256, seed=None, rows_at_a_time=256, "
    "progress=True",
    "to_bayesian": f"model, filter_fn=None, rho_init=-5.0, {PRIOR}",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature(name):
    found = bnuq
    for part in name.split("."):
        found = getattr(found, part)
    signature = inspect.signature(found)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    assert text == f"({SIGNATURES[name]})"


PLACES = (bnuq, bnuq.data, bnuq.metrics, bnuq.ops, bnuq.plots)
FUNCTIONS = [f for place in PLACES for f in vars(place).values() if inspect.isfunction(f)]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_types_of_all_arguments_and_of_the_result(function):
    signature = inspect.signature(function)
    types = [signature.return_annotation, *(p.annotation for p in signature.parameters.values())]
    assert inspect.Signature.empty not in types


@pytest.mark.parametrize("module", [bnuq, bnuq.data, bnuq.metrics, bnuq.ops, bnuq.plots])
def test_help_lists_what_is_public(module):
    names = {n for n, v in vars(module).items() if n[0] != "_" and not inspect.ismodule(v)}
    help_text = pydoc.render_doc(module, "%s", renderer=pydoc.plaintext)
    public = {*module.__all__} - {"__version__", "data", "metrics", "ops", "plots"}
    assert public == names
    assert all(re.search(rf"^    (class )?{n}(\(| =)", help_text, re.M) for n in public)
