"""The tables of the catalogue. Times are seconds since 1970, UTC. Migrations are in service/migrations/versions."""

from __future__ import annotations

import sqlalchemy as sa

REVISION = "0001"  # the newest migration, which makes these tables
metadata = sa.MetaData()

DIGEST = sa.String(64)
NAME = sa.String(64)

files = sa.Table(
    "files",
    metadata,
    sa.Column("digest", DIGEST, primary_key=True),
    sa.Column("op", NAME, nullable=False),
    sa.Column("arch", NAME, nullable=False),
    sa.Column("rows", sa.BigInteger, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("added_at", sa.Float, nullable=False),
    sa.Column("added_by", NAME, nullable=True),
)

models = sa.Table(
    "models",
    metadata,
    sa.Column("digest", DIGEST, primary_key=True),
    sa.Column("op", NAME, nullable=False),
    sa.Column("arch", NAME, nullable=False),
    sa.Column("stored_at", sa.Float, nullable=False),
    sa.Column("job_id", sa.String(32), nullable=True),
    sa.Column("summary", sa.JSON, nullable=False),  # metrics, data and training of the manifest
)

# Which model came into force when, and who said so. The registry's pointer, not this, says which one is in force.
events = sa.Table(
    "events",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("op", NAME, nullable=False),
    sa.Column("arch", NAME, nullable=False),
    sa.Column("action", sa.String(16), nullable=False),  # promote or rollback
    sa.Column("model_id", sa.String(96), nullable=True),
    sa.Column("by", NAME, nullable=True),
)

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("op", NAME, nullable=False),
    sa.Column("arch", NAME, nullable=False),
    sa.Column("parameters", sa.JSON, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("stage", sa.String(16), nullable=False),
    sa.Column("done", sa.Integer, nullable=False, default=0),  # of `total`, within the stage
    sa.Column("total", sa.Integer, nullable=False, default=0),
    sa.Column("reason", sa.Text, nullable=False, default=""),  # why it ended as it did
    sa.Column("result", sa.JSON, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False, default=0),
    sa.Column("cancel", sa.Boolean, nullable=False, default=False),
    sa.Column("owner", sa.String(96), nullable=True),  # the runner that has it
    sa.Column("lease_until", sa.Float, nullable=False, default=0.0),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("created_by", NAME, nullable=True),
    sa.Column("started_at", sa.Float, nullable=True),
    sa.Column("ended_at", sa.Float, nullable=True),
    # The database itself keeps a second one of an op and arch from running, or from waiting.
    sa.Index("one_running", "op", "arch", unique=True, sqlite_where=sa.text("state = 'running'"),
             postgresql_where=sa.text("state = 'running'")),
    sa.Index("one_queued", "op", "arch", unique=True, sqlite_where=sa.text("state = 'queued'"),
             postgresql_where=sa.text("state = 'queued'")),
)  # fmt: skip

job_log = sa.Table(
    "job_log",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("job_id", sa.String(32), nullable=False, index=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
)

# What the candidate of a job picks, beside the pick that was answered.
shadow_picks = sa.Table(
    "shadow_picks",
    metadata,
    sa.Column("job_id", sa.String(32), primary_key=True),
    sa.Column("shape", sa.String(512), primary_key=True),  # JSON
    sa.Column("current", sa.JSON, nullable=False),
    sa.Column("candidate", sa.JSON, nullable=False),
    sa.Column("requests", sa.BigInteger, nullable=False),
)

shape_counts = sa.Table(
    "shape_counts",
    metadata,
    sa.Column("op", NAME, primary_key=True),
    sa.Column("arch", NAME, primary_key=True),
    sa.Column("shape", sa.String(512), primary_key=True),  # JSON
    sa.Column("count", sa.Float, nullable=False),
    sa.Column("first_seen", sa.Float, nullable=False),
    sa.Column("last_seen", sa.Float, nullable=False),
)

tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("name", NAME, primary_key=True),
    sa.Column("hash", DIGEST, nullable=False, unique=True),  # sha256 of the token, which itself is nowhere
    sa.Column("scope", sa.String(16), nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
)

# Answers to requests that carried an Idempotency-Key, for those who send them again.
answers = sa.Table(
    "answers",
    metadata,
    sa.Column("key", sa.String(256), primary_key=True),  # who, route and the key itself
    sa.Column("fingerprint", DIGEST, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("body", sa.JSON, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
)
