"""What Alembic runs: the migrations, on the connection that the caller holds."""

from __future__ import annotations

from alembic import context

from tilewise.service.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
context.run_migrations()
