"""Plain torch models that know no rank."""
