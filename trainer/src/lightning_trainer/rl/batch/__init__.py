"""From rollouts to training rows: the steps of every algorithm, in order. Pure functions.

Every attempt becomes calls with credit (`sharing.calls_of`), each call is compared with others (`comparison.compared`),
and only then is anything left out and arranged in rows (`batch.batch_of`). An algorithm, in
`lightning_trainer.rl.algorithms`, defines what is compared with what.

Axes: `_M` calls that are compared, `_R` rows.
"""
