"""Settings of a job that trains for as long as it is watched: a small model, made-up data."""

SETTINGS = (
    "data.synthetic=true",
    "data.path=''",
    "model.vocab_size=512",
    "training.steps=10000000",
    "validation.interval=0",
    "metrics.log_interval=1",
    "metrics.tensorboard=false",
)
