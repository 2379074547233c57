"""From rollouts to training rows: the steps that every algorithm takes, in their order. Pure functions.

Every attempt becomes calls with credit (`sharing.calls_of`), each call is compared with others (`comparison.compared`),
and only then is anything left out and laid out in rows (`batch.batch_of`). An algorithm, in
`lightning_trainer.rl.algorithms`, says what is compared with what.

Axes: `_M` calls that are compared, `_R` rows.
"""
