"""Cloze items: which word goes on, in general and technical English.

Writes cloze.jsonl beside this file:  python -m evaluation.data.generate
"""

from __future__ import annotations

from collections.abc import Iterator

# topic -> lines of `context | right ending | wrong endings`
ITEMS = {
    "files": """
        Open the file in read-only | mode | sum, error, sister
        Close the file when you are | done | blue, equal
        Read the next line of the | file | mistake, sunshine, minute
        The name of the directory that contains the | files | opinions, seconds
        Return True if the path points to an existing | directory | language, signal, apple
        Write the given string to the | file | age, decision
        The size of the file in | bytes | letters of grass, hours, degrees
        The file does not | exist | listen, weigh, promise
        Delete the temporary | files | reasons, ideas
        The encoding used to decode the | text | table legs, river, clock
        Create the parent directory if it does not already | exist | sleep, agree
        The path is relative to the current working | directory | weather, number, function name
        Append the text to the end of the | file | colour, reason
        Return the last part of the | path | rain, patience, error
    """,
    "functions": """
        This function takes two | arguments | minutes ago, windows, rivers
        Return the sum of the two | numbers | functions that, doors, files are
        The default value is | None | quickly, very, between
        Raise a ValueError if the argument is | invalid | happily, the, raining
        The function is called once for each | element | slowly, never, importance
        Return a new list that contains the same | elements | weather, moment, purpose
        If the argument is omitted, the default is | used | eaten, blue, sung
        The first argument must be a | string | quickly, because, loudly
        This method must be implemented by | subclasses | oranges, mornings, commas
        Return True if the two objects are | equal | asleep, hungry
        The second argument is | optional | thirsty, raining, afternoon
        This method should not be called | directly | green, of, noise
        Call the function with the given | arguments | mountains, regrets
        The return value is always a | tuple | because, softly, run
        A decorator that caches the result of a | function | mountain, breakfast, rainbow
        Exceptions raised by the callback are | ignored | delicious, tall, yesterday
    """,
    "data": """
        A dictionary maps keys to | values | trees, clouds, minutes
        Return the keys and values of the | dictionary | sunset, opinion
        The items of the list are sorted in ascending | order | music, coffee, spirit
        Remove duplicates from the | list | moon, moment, promise
        Return the number of rows and | columns | weekends, smiles, doors
        The index of the first | element | Tuesday, feeling, rain
        Convert the string to lower | case | house, mouse, time zone
        Split the string at each | comma | winter, elephant, idea
        The array has three rows and two | columns | thoughts, answers, mornings
        Return the largest value in the | array | story, evening, silence
        An empty list has length | zero | green, under, mode
        The elements of a set are | unique | loud, frozen in ice, late
        The shape of the input | array | holiday, cheese, breath
        Strings are sequences of | characters | kitchens, rivers, Mondays
        Fill missing values with | zeros | guests, anger
        Compute the mean and the standard | deviation | breakfast, window, language
        Values outside the given range are | clipped | baked, married, whispered
    """,
    "network": """
        Connect to the server on the given | port | apple, feeling, sentence
        The client sends a request and waits for a | response | holiday, flower, colour
        The connection was closed by the | server | breakfast, noun, colour
        The timeout is given in | seconds | kilograms, apples, colours
        Send the message to all connected | clients | mountains, adjectives
        The address of the remote | host | summer, melody, spoon
        Return the headers of the HTTP | response | garden, ceiling
        Retry the request if the connection | fails | sings, blooms, melts
        The user name and the | password | river, autumn, ladder
        Listen for incoming | connections | sandwiches, vowels
        Download the page at the given | URL | mood, spoon, winter
        The certificate of the server could not be | verified | eaten, painted red, sung
    """,
    "concurrency": """
        Acquire the lock before changing the shared | state | spoon, cheese, song
        Wait until all threads have | finished | tasted, rained, flown south
        Start a new process in the | background | soup, alphabet, kitchen sink
        The queue blocks until an item is | available | delicious, purple, loud
        Release the | lock | snow, adverb, sandwich
        The task was cancelled before it was | finished | thirsty, purple
        Run the function in a separate | thread | sandwich, opinion, cloud
        Only one thread at a time may hold the | lock | weather, breakfast
        The worker takes the next job from the | queue | ocean, ceiling, tongue
        Block until the event is | set | eaten, taught, sewn
    """,
    "errors": """
        An error is raised if the file is not | found | happy, loud, wide
        Print a warning and | continue | purple, Monday, softly
        The error message is written to the | log | garden, soup, ceiling
        Catch the exception and try | again | blue, soup, never of
        The program exits with a non-zero status on | failure | honey, breakfast, velvet
        The stack trace shows where the error | occurred | tasted, bloomed, danced
        Index out of | range | milk, patience, velvet
        Division by | zero | summer, apple, noise
        The argument has the wrong | type | smell, brother, season
        The test fails because the result is not | correct | hungry, asleep
        Not enough memory to allocate the | array | brother, picnic, autumn
        The variable is used before it is | defined | fried, hungry, seated
    """,
    "general": """
        She opened the door and walked into the | room | number, because, speed
        It was raining, so he took an | umbrella | idea of, hour, orange lamp
        The sun rises in the | east | spoon, lock, north-west corner of
        They drank a cup of | tea | sand, paper, grammar
        The dog wagged its | tail | roof, engine, chapter
        He was tired and went to | bed | blue, loud, two
        Winter is colder than | summer | shoes, yesterday's bread, soup
        She wrote a letter to her | friend | minus, purple, engine oil
        The train arrived ten minutes | late | tall, sweet, green
        We bought bread and butter at the | shop | cloud, verb, moon
        A week has seven | days | doors, colours, uncles
        The children played in the | garden | verb, minute, theory
        Close the window, it is | cold | verb, seven, ago
        He read the book from beginning to | end | blue, seven, soon
        The opposite of left is | right | cheese, maybe, slow
        The bird flew over the | trees | verbs, numbers, Mondays
        She could not find her | keys | of, verbs, thunder
        The soup was too hot to | eat | read, drive, sleep
        The ship crossed the | ocean | alphabet, hour, verb
        He answered the question with a simple | yes | cloud, tomato, elbow
        The baby began to | cry | compile, depreciate, evaporate
        Please turn off the | light | river, alphabet, silence of
        Ice melts when it gets | warm | tall, polite, expensive
        The doctor told him to take the | medicine | minute, alphabet, horizon
    """,
    "software": """
        Install the package with the following | command | weather, cousin, soup
        This feature was added in | version | soup, cousin, purple
        See the documentation for more | information | butter, rivers, mothers
        The code is released under the MIT | licence | breakfast, river, engine
        Set the environment | variable | banana, holiday, elbow
        Press the button to start the | program | cousin, river, winter
        The compiler translates source code into machine | code | milk, rain, dance
        Bugs should be reported to the issue | tracker | banana, cousin, pillow
        Run the tests before you commit your | changes | cousins, dreams, tomatoes
        This option is deprecated and will be removed in a future | release | dinner, river, cousin
        The model is trained on a large | dataset | breakfast, cousin, elbow
        The loss is computed on each | batch | cousin, Monday, dream
    """,
}


def rows() -> Iterator[dict[str, object]]:
    """The rows of cloze.jsonl: context, choices (the right one at index `gold`), gold, topic."""
    number = 0
    for topic, block in ITEMS.items():
        for line in block.strip().splitlines():
            context, right, wrong = (part.strip() for part in line.split(" | "))
            choices = [ending.strip() for ending in wrong.split(",")]
            # The right one wanders through the places, so that a model that prefers one place is at chance.
            gold = number % (len(choices) + 1)
            choices.insert(gold, right)
            number += 1
            yield {"context": context, "choices": choices, "gold": gold, "topic": topic}
