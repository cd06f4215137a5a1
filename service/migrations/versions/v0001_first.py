"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

NAME = sa.String(64)
DIGEST = sa.String(64)


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("digest", DIGEST, primary_key=True),
        sa.Column("op", NAME, nullable=False),
        sa.Column("arch", NAME, nullable=False),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("added_at", sa.Float, nullable=False),
        sa.Column("added_by", NAME),
    )
    op.create_table(
        "models",
        sa.Column("digest", DIGEST, primary_key=True),
        sa.Column("op", NAME, nullable=False),
        sa.Column("arch", NAME, nullable=False),
        sa.Column("stored_at", sa.Float, nullable=False),
        sa.Column("job_id", sa.String(32)),
        sa.Column("summary", sa.JSON, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("op", NAME, nullable=False),
        sa.Column("arch", NAME, nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("model_id", sa.String(96)),
        sa.Column("by", NAME),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("op", NAME, nullable=False),
        sa.Column("arch", NAME, nullable=False),
        sa.Column("parameters", sa.JSON, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("stage", sa.String(16), nullable=False),
        sa.Column("done", sa.Integer, nullable=False),
        sa.Column("total", sa.Integer, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("result", sa.JSON, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("cancel", sa.Boolean, nullable=False),
        sa.Column("owner", sa.String(96)),
        sa.Column("lease_until", sa.Float, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("created_by", NAME),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
    )
    for state in ("running", "queued"):
        where = sa.text(f"state = '{state}'")
        op.create_index(f"one_{state}", "jobs", ["op", "arch"], unique=True, sqlite_where=where, postgresql_where=where)
    op.create_table(
        "job_log",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
    )
    op.create_index("ix_job_log_job_id", "job_log", ["job_id"])
    op.create_table(
        "shadow_picks",
        sa.Column("job_id", sa.String(32), primary_key=True),
        sa.Column("shape", sa.String(512), primary_key=True),
        sa.Column("current", sa.JSON, nullable=False),
        sa.Column("candidate", sa.JSON, nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "shape_counts",
        sa.Column("op", NAME, primary_key=True),
        sa.Column("arch", NAME, primary_key=True),
        sa.Column("shape", sa.String(512), primary_key=True),
        sa.Column("count", sa.Float, nullable=False),
        sa.Column("first_seen", sa.Float, nullable=False),
        sa.Column("last_seen", sa.Float, nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("name", NAME, primary_key=True),
        sa.Column("hash", DIGEST, nullable=False, unique=True),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "answers",
        sa.Column("key", sa.String(256), primary_key=True),
        sa.Column("fingerprint", DIGEST, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
