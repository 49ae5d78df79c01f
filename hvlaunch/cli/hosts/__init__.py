"""Commands on hosts themselves, whether a job runs on them or not."""

__all__: list[str] = []
