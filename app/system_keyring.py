"""Secrets in the system's keyring, which may ask the person to unlock it, or not be there."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

SERVICE = "Tandem"


def read_secret(name: str) -> str:
    """Return a secret; "" for none, or without a keyring."""
    import keyring

    try:
        return keyring.get_password(SERVICE, name) or ""
    except Exception as error:  # noqa: BLE001 services of desktops fail in many ways
        log.info("the keyring cannot be read: %s", type(error).__name__)
        return ""


def keep_secret(name: str, secret: str) -> bool:
    """Keep a secret, or none for ""; return whether the keyring has done so."""
    import keyring
    from keyring.errors import KeyringError, PasswordDeleteError

    try:
        if secret:
            keyring.set_password(SERVICE, name, secret)
        else:
            keyring.delete_password(SERVICE, name)
    except PasswordDeleteError:  # there was none
        return True
    except KeyringError as error:
        log.info("the keyring cannot be used: %s", type(error).__name__)
        return False
    except Exception as error:  # noqa: BLE001 services of desktops fail in many ways
        log.info("the keyring has failed: %s", type(error).__name__)
        return False
    return True
