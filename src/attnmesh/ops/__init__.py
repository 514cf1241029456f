"""Operations on one device. Nothing here knows of other ranks."""
