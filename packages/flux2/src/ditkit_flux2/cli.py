"""The commands flux2-train, flux2-encode, flux2-sample and flux2-export."""

from ditkit_core.commands.cli import commands
from ditkit_flux2.spec import FLUX2

train, encode, sample, export = commands(FLUX2)
