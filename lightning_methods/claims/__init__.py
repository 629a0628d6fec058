"""The claim runner: a paper's central comparison at small scale, over several seeds, with a verdict.

``python -m lightning_methods.claims gift`` runs what ``configs/gift/claim.yaml`` says::

    claim: With ten images per class, GIFT trains a better student than the KL divergence.   # one sentence
    source: Shang et al. (2025), table 2
    base: digits.yaml            # beside this file, or from the repository's root; a list of files is stacked
    seeds: [0, 1, 2]             # the default
    metric: test/acc             # what a run's name alone stands for below
    args:                        # command-line arguments of every run
      - --data.init_args.seed={seed}
    runs:
      teacher: {config: teacher.yaml, common_args: false, hidden: true}
      kl: {args: ["--model.init_args.loss=kl", "--data.init_args.teacher={checkpoint:teacher}"]}
      gift: {args: ["--data.init_args.teacher={checkpoint:teacher}"]}
      nearest: {call: lightning_methods.gift.baselines.nearest_mean, arguments: {seed: "{seed}"}}
    expect:
      - {expression: "gift - kl > 0.10", why: "KL is the loss of SRe2L and RDED."}
      - {expression: "gift:test/ece <= 0.7 * kl:test/ece", every_seed: true}
    note: What a reader should know.                                                          # optional

A run is one of

* the base config with ``args``; or ``config:``, other file(s) instead of the base. ``common_args: false`` leaves the
  common arguments out; ``subcommand: test`` (or ``validate``) evaluates and does not train.
* ``call:``, a function of keyword ``arguments`` that returns ``{metric: number}`` (and, under the key ``checkpoint``,
  the path of what it made): for what is not a training run, such as a scikit-learn baseline or a measurement.

In ``args`` and ``arguments``, ``{seed}`` is the seed, ``{folder}`` the run's own folder, ``{checkpoint:RUN}`` and
``{folder:RUN}`` the checkpoint and the folder of another run with the same seed, which is then run before.
``hidden: true`` leaves a run out of the results. Other braces are left alone.

Every expectation is brought to the form *difference (comparison) margin*. Seeds are paired: the difference is taken for
every seed, and its mean gets a 95 % t interval. The expectation holds if the whole interval clears the margin, with
``every_seed: true`` if every seed does. All metrics that a run's test logs are saved.
"""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .app import main as main
    from .definition import load_claim as load_claim
    from .expressions import ClaimError as ClaimError
    from .expressions import Expression as Expression
    from .expressions import t_interval as t_interval
    from .plots import overview as overview
    from .plots import style as style

__getattr__, __dir__, __all__ = attach(__name__, __file__)
