"""The regression that predicts launch times, its evaluation and its saved form."""
