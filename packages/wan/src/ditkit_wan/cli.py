"""The commands wan-train, wan-encode, wan-sample and wan-export."""

from ditkit_core.commands.cli import commands
from ditkit_wan.spec import WAN

train, encode, sample, export = commands(WAN)
