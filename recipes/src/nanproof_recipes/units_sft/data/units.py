"""Units and what they are in terms of one another, exactly: the truth that questions are made from and answers are judged by.

Every unit has a size in its family's base unit as a fraction, so a factor between two of them is exact until it is written down.
A month and a year are calendar lengths that nobody agrees on: a year is 365 days here, and there are no months.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit, the words people use for it, and its size."""

    name: str
    plural: str
    symbol: str
    size: Fraction
    family: str


def _family(family: str, *units: tuple[str, str, str, str]) -> list[Unit]:
    return [Unit(name, plural, symbol, Fraction(size), family) for name, plural, symbol, size in units]


UNITS: tuple[Unit, ...] = (
    *_family(
        "length",
        ("millimeter", "millimeters", "mm", "1/1000"),
        ("centimeter", "centimeters", "cm", "1/100"),
        ("meter", "meters", "m", "1"),
        ("kilometer", "kilometers", "km", "1000"),
        ("inch", "inches", "in", "0.0254"),
        ("foot", "feet", "ft", "0.3048"),
        ("yard", "yards", "yd", "0.9144"),
        ("mile", "miles", "mi", "1609.344"),
    ),
    *_family(
        "mass",
        ("milligram", "milligrams", "mg", "1/1000"),
        ("gram", "grams", "g", "1"),
        ("kilogram", "kilograms", "kg", "1000"),
        ("ounce", "ounces", "oz", "28.349523125"),
        ("pound", "pounds", "lb", "453.59237"),
        ("stone", "stones", "st", "6350.29318"),
    ),
    *_family(
        "volume",
        ("milliliter", "milliliters", "mL", "1/1000"),
        ("liter", "liters", "L", "1"),
        ("pint", "pints", "pt", "0.473176473"),
        ("quart", "quarts", "qt", "0.946352946"),
        ("gallon", "gallons", "gal", "3.785411784"),
        ("cup", "cups", "cup", "0.2365882365"),
    ),
    *_family(
        "time",
        ("second", "seconds", "s", "1"),
        ("minute", "minutes", "min", "60"),
        ("hour", "hours", "h", "3600"),
        ("day", "days", "d", "86400"),
        ("week", "weeks", "wk", "604800"),
        ("year", "years", "yr", "31536000"),
    ),
    *_family(
        "speed",
        ("meter per second", "meters per second", "m/s", "1"),
        ("kilometer per hour", "kilometers per hour", "km/h", "5/18"),
        ("mile per hour", "miles per hour", "mph", "0.44704"),
        ("knot", "knots", "kn", "463/900"),
    ),
    *_family(
        "data",
        ("bit", "bits", "bit", "1/8"),
        ("byte", "bytes", "B", "1"),
        ("kilobyte", "kilobytes", "kB", "1000"),
        ("megabyte", "megabytes", "MB", "1000000"),
        ("gigabyte", "gigabytes", "GB", "1000000000"),
    ),
    *_family(
        "energy",
        ("joule", "joules", "J", "1"),
        ("kilojoule", "kilojoules", "kJ", "1000"),
        ("calorie", "calories", "cal", "4.184"),
        ("kilocalorie", "kilocalories", "kcal", "4184"),
        ("watt-hour", "watt-hours", "Wh", "3600"),
    ),
    *_family(
        "area",
        ("square meter", "square meters", "m2", "1"),
        ("square foot", "square feet", "ft2", "0.09290304"),
        ("acre", "acres", "ac", "4046.8564224"),
        ("hectare", "hectares", "ha", "10000"),
    ),
)

LEAST, MOST = Fraction(1, 1000), Fraction(10_000)
"""Factors outside of these are left out: nobody asks how many miles a millimeter is."""


def pairs() -> list[tuple[Unit, Unit]]:
    """Every (from, to) of one family whose factor is of a size that people ask for."""
    return [(a, b) for a in UNITS for b in UNITS if a is not b and a.family == b.family and LEAST <= factor(a, b) <= MOST]


def factor(a: Unit, b: Unit) -> Fraction:
    """How many of `b` one of `a` is."""
    return a.size / b.size


def written(value: Fraction, digits: int) -> str:
    """In plain decimal notation with that many significant digits, without zeros at the end: 2756, 39.37, 0.0254."""
    number = Decimal(value.numerator) / Decimal(value.denominator)
    if number == 0:
        return "0"
    rounded = number.quantize(Decimal(1).scaleb(number.adjusted() - digits + 1), rounding=ROUND_HALF_EVEN)
    text = f"{rounded:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
