"""Operations on one device. Nothing here depends on other ranks."""
