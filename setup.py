from configparser import ConfigParser
from pathlib import Path
from setuptools import setup

ini = ConfigParser(interpolation=None)
ini.read(Path(__file__).parent/"settings.ini", encoding="utf-8")
s = ini["DEFAULT"]
extras = {k.removeprefix("extra_"): v.split() for k, v in s.items() if k.startswith("extra_")}
extras["dev"] = s["dev_requirements"].split()
setup(version=s["version"], description=s["description"], keywords=s["keywords"].split(),
      author=s["author"], install_requires=s["requirements"].split(), extras_require=extras)
