"""`reconcile`: queue, lanes and locks against the store, now."""

import typer

from scriptdispatch.cli.session import Session, command


def register(app: typer.Typer) -> None:
    @command(app, "reconcile")
    def reconcile(session: Session) -> None:
        """Compare queue, lanes and locks with the store and mend what is lost."""
        found = session.client.reconcile()
        if session.screen.json:
            session.screen.document(found)
            return
        mended = [f"{name.replace('_', ' ')} {count:,}" for name, count in found.items() if isinstance(count, int) and count]
        session.screen.done("Reconciled: " + (" · ".join(mended) if mended else "nothing to mend"))
