"""The REST service: routes, catalogue, jobs, access. What it decides comes from dispatch and models."""
