"""Words, countries and capitals that the bundled tasks are made of."""

from __future__ import annotations

_COUNTRIES = """
Algeria:Algiers Argentina:Buenos_Aires Australia:Canberra Austria:Vienna Bangladesh:Dhaka Belgium:Brussels
Brazil:Brasilia Bulgaria:Sofia Canada:Ottawa Chile:Santiago China:Beijing Colombia:Bogota Croatia:Zagreb Cuba:Havana
Denmark:Copenhagen Ecuador:Quito Egypt:Cairo Ethiopia:Addis_Ababa Finland:Helsinki France:Paris Germany:Berlin
Ghana:Accra Greece:Athens Hungary:Budapest Iceland:Reykjavik India:New_Delhi Indonesia:Jakarta Iran:Tehran
Iraq:Baghdad Ireland:Dublin Italy:Rome Japan:Tokyo Jordan:Amman Kenya:Nairobi Lebanon:Beirut Libya:Tripoli
Malaysia:Kuala_Lumpur Morocco:Rabat Nepal:Kathmandu New_Zealand:Wellington Nigeria:Abuja North_Korea:Pyongyang
Norway:Oslo Pakistan:Islamabad Peru:Lima Poland:Warsaw Portugal:Lisbon Qatar:Doha Romania:Bucharest Russia:Moscow
Saudi_Arabia:Riyadh Serbia:Belgrade South_Korea:Seoul Spain:Madrid Sweden:Stockholm Syria:Damascus Taiwan:Taipei
Thailand:Bangkok Tunisia:Tunis Turkey:Ankara Uganda:Kampala Uruguay:Montevideo Venezuela:Caracas Vietnam:Hanoi
Zimbabwe:Harare
"""

# In the order of the alphabet.
CAPITALS: dict[str, str] = {
    country: capital for country, _, capital in (pair.replace("_", " ").partition(":") for pair in _COUNTRIES.split())
}

_WORDS = """
apple arm army baby bag ball bank bear bed bell bird boat body bone book bottle bowl box boy branch brass bread brick
bridge brother brush bucket bus butter button cake camera car card cart cat chain chair cheese chest chin church circle
city clock cloth cloud coat collar comb cord corn cow cup curtain cushion daughter dog door dress drop ear egg engine
eye face family farm father feather field finger fire fish flag floor flower fly foot fork fowl frame friend garden
girl glass glove goat gold grass gun hair hammer hand harbor hat head heart hill home hook horn horse hospital house
ice ink iron island jewel judge kettle key knee knife lake leaf leg letter library lion lip lock map market match meat
metal milk mirror money monkey moon mother mountain mouth music nail neck needle nest net night nose nut office oil
orange oven paper park pen pencil picture pig pin pipe plane plant plate plow pocket pot potato pump queen rail rain
rice ring river road rod roof room root rope sail salt sand school scissors sea seat seed sheep shelf ship shirt shoe
silk silver sister skin skirt sky snake snow soap sock son soup spade spoon spring square stamp star station stem stick
stone store street sugar sun table tail thread throat thumb ticket tooth towel tower town train tray tree truck
umbrella wall watch water wax wheel whip whistle wind window wine wing winter wire woman wood wool worm year
"""
WORDS: tuple[str, ...] = tuple(_WORDS.split())
