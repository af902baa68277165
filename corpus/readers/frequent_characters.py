"""Frequent characters of Chinese, Japanese and Korean, by which texts in them are distinguished from random characters.

Random bytes that are decoded as UTF-16 or as an encoding of such a script give characters that are all assigned and
printable. Languages use few of them often: the sets below make up a third to nine tenths of real texts, names and
classical Chinese included, but a twentieth of characters from the whole block, and an eighth of those in GB 2312.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

FEWEST = 100
"""Fewer characters of a script are too little evidence."""
LEAST_FREQUENT_SHARE = 0.2
"""Smallest share of frequent characters among those of a text in the script."""
LEAST_SCRIPT_SHARE = 0.5
"""Share of the characters from which on a text is in the script: tables of rare characters occur in other texts."""

LARGEST_ROW_SHARE = 0.12
"""Largest share of characters from one row of 256 code points in random data, which has a twentieth at most. Lists of
chemical elements or of fish have few frequent characters, but many of one radical, which are neighbours."""

_SIMPLIFIED = (
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然家种事成方多经么去法学如"
    "都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与长把机十民第公此已工使情明性知全三又关点正业外将两高间由"
    "问很最重并物手应战向头文体政美相见被利什二等产或新己制身果加西斯月话合回特代内信表化老给世位次度门任常先海通教儿原东声提立及比员解水名真论"
    "处走义各入几口认条平系气题活尔更别打女变四神总何电数安少报才结反受目太量再感建务做接必场件计管期市直德资命山金指克许统区保至队形社便空决治"
    "展马科司五基眼书非则听白却界达光放强即像难且权思王象完设式色路记南品住告类求据程北边死张该交规万取拉格望觉术领共确传师观清今切院让识候带导"
    "争运六七八九百千元车流服快造转根深住风士音每石城花河夜林"
)
_TRADITIONAL = (
    "國這個們來為時會對後說過發經麼學現當沒動還進樣開無與長機實間問應戰頭體見產爾數報結場計資許統區隊決馬書聽達強難權設類據邊張該規萬覺術領"
    "確傳師觀讓識帶導爭運車東門聲員論處義條氣題變總電務關點業將兩種從軍話給認幾別帳號顯網檔標選錯誤關"
)
_JAPANESE = (
    "円気午男校語土木聞食友左右休父母雨発京言田持野元近考画売集始朝終台広町料急止送転研足究楽店病質待試族銀早映親験英医仕味写字答注帰古歌買"
    "悪図週室歩紙黒春赤青館屋秋夏習駅洋旅夕借飲肉堂鳥飯勉冬昼茶弟牛魚兄犬妹姉漢県村毎読川私番号表示設定追加削除検索変更保存"
)
_CLASSICAL = "曰矣焉哉乃若夫故吾君臣仁禮礼智聖圣賢贤乎豈岂莫皆未亦謂谓孰侯帝云雲酒客春秋江月鳥鸟歸归"
_NAMES = (
    "李刘劉陈陳杨楊赵趙黄黃周吴吳徐孙孫胡朱郭罗羅梁宋郑鄭谢謝韩韓唐冯馮董萧蕭曹袁邓鄧傅沈曾彭吕呂苏蘇卢盧蒋蔣蔡贾賈丁魏薛叶葉余潘杜戴钟鍾"
    "汪任姜范姚谭譚廖邹鄒熊陆陸郝孔崔康毛邱秦史顾顧邵孟龙龍段伟偉芳娜秀敏静靜丽麗磊勇艳艷杰傑娟涛濤超霞刚剛桂建华華志玉红紅晓曉婷欣佳怡"
    "佐藤鈴渡辺伊村吉松井清池橋阿森斎部郎夫恵美和也"
)
_HANGUL = (
    "이다의는을에가고하지를사로기한은어도자리시인으그있서나수대일아해들정보제라주것면전과여부장게만구상소성스니원와조유거었적동국공용신요안던간경"
    "오무생했모된러세진위중선문습계년명관교실화물마비분학발말미방우치개우내려할때않없같더각음저강습김박최"
)
_SCRIPTS = (
    ("Chinese", 0x4E00, 0x9FFF, _SIMPLIFIED + _TRADITIONAL + _JAPANESE + _CLASSICAL + _NAMES),
    ("Korean", 0xAC00, 0xD7A3, _HANGUL),
)


def random_characters(text: str) -> str:
    """The reason why a text consists of characters as random data have them; "" for another one."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    for name, first, last, _ in _SCRIPTS:
        of_script = points[(points >= first) & (points <= last)]
        if of_script.size < max(FEWEST, LEAST_SCRIPT_SHARE * points.size):
            continue
        frequent = int(np.count_nonzero(_is_frequent(name)[of_script - first]))
        largest_row = int(np.bincount(of_script >> 8).max())
        if frequent < LEAST_FREQUENT_SHARE * of_script.size and largest_row < LARGEST_ROW_SHARE * of_script.size:
            return f"not text: binary data (of {of_script.size:,} {name} characters {frequent:,} are frequent ones)"
    return ""


@cache
def _is_frequent(name: str) -> NDArray[np.bool_]:
    """Return a mask of the characters of a script, by their distance from its first."""
    first, last, characters = next(script[1:] for script in _SCRIPTS if script[0] == name)
    mask = np.zeros(last - first + 1, np.bool_)
    mask[[ord(character) - first for character in set(characters)]] = True
    return mask
