"""Cloze items: which word goes on, in general and technical English.

Writes evaluation/data/cloze.jsonl:  python -m tools.benchmark_data.generate
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
        Copy the file to a new | location | sorrow, birthday, flavour
        The extension of the file | name | rain, laughter, soup
        List all files in the given | folder | moment, melody, uncle
        Save the changes before you close the | editor | ocean, verb, autumn
        The archive is unpacked into a temporary | directory | sister, adjective, holiday
        You do not have permission to write to this | file | thunder, breakfast
        Rename the file so that its name does not contain | spaces | mothers, evenings, soup
        Read the configuration from the file and return it as a | dictionary | thunder, sausage, Tuesday
        Skip empty lines and lines that start with a | comment | sneeze, lake, cousin
        A symbolic link points to another | file | appetite, sunset, whisper
        The disk is full, so nothing more can be | written | married, sung, boiled
        Move the cursor to the beginning of the | line | soup, jealousy, winter
        Check whether the path is absolute or | relative | hungry, sweet, asleep
        If the file already exists, it will be | overwritten | thirsty, embarrassed, baked
        The log file is rotated when it grows too | large | polite, musical, fragrant
        Compare the contents of the two | files | sneezes, horizons, Mondays
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
        Return a copy of the original | list | thunder, hunger, sunset
        The callback receives the event as its only | argument | umbrella, cousin
        A function that calls itself is | recursive | salty, barefoot, married
        The method returns the object itself so that calls can be | chained | peeled, sung, watered
        Arguments can be given by position or by | name | soup, thunder, kitchen
        The constructor creates a new instance of the | class | rain, supper, horizon
        A private method should only be used inside its own | class | orchard, sleep
        If no value is given, the function returns | None | softly, purple rain, of
        This property is read-only and cannot be | changed | swallowed, invited, sunburnt
        The wrapper has the same signature as the wrapped | function | horse, lake, cousin
        The generator yields one item at a | time | horse, colour, because
        Look up the attribute by its | name | knee, thunder, sauce
        The keyword arguments are passed on to the parent | class | potato, gently, noon
        The result of the expensive call is stored in a | cache | sneeze, sunset
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
        Each row of the table has a unique | key | sneeze, aunt, perfume
        Sort the rows by the values in the first | column | dream, wedding, puddle
        Remove the last element from the | stack | thunder, jealousy, beard
        The tuple cannot be changed after it has been | created | swallowed, sunburnt, forgiven
        Count how often each word occurs in the | text | spoon, thunder, elbow
        Join the strings with a comma between | them | purple, ago, sneezes
        Convert the list to a | set | sneeze, Tuesday, thunder
        The matrix is multiplied by its | transpose | umbrella, grandmother, lunch
        The values are rounded to two decimal | places | trousers, uncles, storms
        Remove the white space at the beginning and at the end of the | string | cousin, weather, banquet
        The table is stored as a file with values separated by | commas | elephants, holidays, regrets
        Look for the smallest number in the | list | perfume, thunder
        A queue returns its items in the order in which they were | added | loved, fried, rained
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
        The browser sends a cookie with each | request | mountain, sneeze, eyelash
        Bind the socket to a local | address | sandwich, melody, eyelash
        The server returns the page as | HTML | gravel, sorrow, honey
        The message is encrypted before it is | sent | hungry, tall, peeled
        Enter your user name to log | in | purple, of, sandwich
        The packet was lost, so it is sent | again | purple, velvet, because
        A proxy forwards requests to another | server | grandmother, rainbow, spoon
        The domain name is resolved to an IP | address | omelette, trumpet, meadow
        The web page could not be | found | embarrassed, thirsty, boiled
        Upload the file to the remote | server | sneeze, adjective, supper
        The firewall blocks all incoming | traffic | laughter, butterflies
        The token expires after one | hour | elbow, potato, adverb
        The response has the status | code | soup, feather, uncle
        The client must authenticate before it can send | requests | clouds, vowels, puddles
        Both sides close the connection when the transfer is | complete | jealous, fragrant, blond
        The number of requests per minute is | limited | delicious, barefoot
        The data are sent in small | packets | feelings, whiskers, Tuesdays
        If the host cannot be reached, an error is | returned | watered, tasted, hugged
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
        Two threads must not write to the same variable at the same | time | spoon, colour, sneeze
        The main thread waits for the other threads to | finish | blossom, rhyme, melt
        Put the item into the | queue | thunder, opinion, Tuesday
        The pool starts four worker | processes | trousers, melodies, puddles
        If the lock is already held, the call will | block | snore, blossom
        A deadlock occurs when two threads wait for each | other | purple, soup, verb
        The result of the task is not yet | available | salty, barefoot, blond
        Cancel all tasks that are still | running | sweet, woollen, salty
        The event loop runs until there are no more | tasks | whiskers, sunsets, aunts
        Each process has its own | memory | thunder, perfume, moustache
        The shared counter is protected by a | lock | poem, sandwich, breeze
        Stop the worker when the queue is | empty | jealous, fluffy, polite
        The child process exits with a status | code | feather, pancake, river
        Call this function from the main | thread | onion, poem, weather
        The scheduler decides which job runs | next | purple, salty, sneezes
        If the task takes too long, it is | cancelled | peeled, perfumed, married
        Use a semaphore to limit the number of concurrent | connections | grandmothers, sunsets
        The threads exchange messages through a | queue | sneeze, omelette, sunset
        An asynchronous function must be awaited by the | caller | pancake, horizon, feather
        The handler is called when the process receives a | signal | haircut, pancake, sunburn
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
        The password is wrong, please try | again | purple, spoon, because
        The parser reports the line on which the error was | found | tasted, embroidered, hugged
        A missing bracket is a syntax | error | pancake, meadow, violin
        Raise an exception if the value is | negative | barefoot, thirsty, woollen
        The program crashed because of a null | pointer | pancake, sunset, aunt
        The error is logged and then | ignored | sprinkled, married, watered
        An infinite loop never | ends | sneezes, tastes, blushes
        The input contains an unexpected | character | sunset, appetite, spring
        The key was not found in the | dictionary | jealousy, applause
        The assertion failed because the two values are not | equal | thirsty, barefoot, fried
        The warning can safely be | ignored | peeled, swallowed, knitted
        The request failed with an unknown | error | grandmother, pancake, fragrance
        Make sure that the path is spelled | correctly | purple, of, seven
        The operation timed | out | purple, spoon, verb
        This code has a bug that needs to be | fixed | eaten, sung, worn
        The connection failed, check the network | settings | pancakes, blossoms, giggles
        If an exception is raised, the changes are rolled | back | purple, spoon
        The value is too large to be stored in an | integer | orchestra, apricot, evening
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
        He put on his shoes and went | outside | purple, seven, verb
        The cat drank the | milk | verb, roof, Tuesday
        She switched on the lamp because it was | dark | Tuesday, wooden
        We waited for the bus at the bus | stop | soup, verb, moon
        The knife is very | sharp | married, seven, early
        There are sixty minutes in an | hour | elephant, apple, elbow
        He locked the door and put the key in his | pocket | verb, thunder, alphabet
        She was thirsty and asked for a glass of | water | thunder, gravel, verbs
        The river flows into the | sea | verb, Tuesday, sleeve
        They lived in a small house at the end of the | street | verb, soup, sneeze
        He cut the cake into eight | pieces | verbs, clouds, Tuesdays
        My watch is broken, can you tell me the | time | verb, thunder
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
        Download the latest version from the project's | website | eyelash, thunder, appetite
        The tests are run automatically after every | commit | eyebrow, perfume, onion
        The library is compatible with older versions of | Python | thunder, jealousy
        The application is configured by a configuration | file | onion, tear, meadow
        Type the command and press the enter | key | soup, cousin, leaf
        Restart the computer to complete the | installation | omelette, moonlight, sunburn
        The user interface is available in several | languages | stomachs, puddles, onions
        The button is disabled until the form is | complete | hungry, fried, jealous
        Click on the link to open the | page | thunder, appetite, verb
        The old API is kept for backwards | compatibility | soup, eyelash, thunder
        Fork the repository and create a new | branch | eyebrow, thunder, appetite
        The patch was reviewed and | merged | boiled, sneezed, perfumed
        Store the password in a safe | place | sneeze, verb, adverb
        The plugin must be enabled in the | settings | eyelashes, puddles, moonlight
        A backup of the database is made every | night | spoon, elbow
        The documentation is generated from the source | code | soup, beard, violin
        By default, debug output is turned | off | purple, verb, spoon
        The memory is freed when the object is no longer | needed | sung, thirsty, boiled
    """,
    "mathematics": """
        The sum of two and two is | four | spoon, Tuesday, green
        Ten divided by two is | five | butter, quickly, cousin
        A triangle has three | sides | uncles, Mondays, melodies
        The square root of nine is | three | honey, softly, winter
        Half of one hundred is | fifty | soup, never, velvet
        An even number can be divided by | two | rain, laughter, bread
        Parallel lines never | meet | sneeze, blush, boil
        The angles of a triangle add up to 180 | degrees | puddles, aunts, verses
        The product of any number and zero is | zero | butter, jealous
        The area of a rectangle is its width times its | height | sorrow, supper, nephew
        A circle has a centre and a | radius | nephew, supper, grudge
        The probability of an event lies between zero and | one | soup, thunder, slowly
        The median is the value in the | middle | sandwich, choir, blanket
        The graph consists of nodes and | edges | pancakes, nephews, feathers
        The distance between two points is never | negative | thirsty, married, woollen
        A prime number has no divisors except one and | itself | soup, gently, herring
        The function is continuous at every | point | haircut, supper, nephew
        Solve the equation for the unknown | variable | pancake, blanket, mattress
        The derivative of a constant is | zero | cheese, asleep, Friday
        The vectors have the same | length | nephew, supper, sneeze
        The mean is the sum divided by the number of | values | whispers, haircuts
        If x is greater than y, then y is less than | x | soup, sadly, breakfast
        One metre has one hundred | centimetres | grandmothers, sonnets, opinions
        The determinant of the matrix is | positive | thirsty, fragrant, left-handed
        The set contains all integers from one to | ten | cheese, sorrow, blankets
        A random number is drawn from a normal | distribution | trombone, pillow, grandmother
        The value of the expression is either true or | false | buttered, barefoot, Friday
        To convert hours into minutes, multiply by | sixty | honey, kindness
        Every square is also a | rectangle | sneeze, trombone, supper
    """,
    "everyday": """
        In autumn the leaves fall from the | trees | adverbs, opinions, trousers
        Fish live in the | water | alphabet, opinion, staircase
        The moon shines at | night | spoon, fork, grammar
        Bees make | honey | bricks, sonnets
        The farmer milks the | cows | verbs, ladders, invoices
        Snow is | white | angry, hourly, literate
        Birds build their nests in | spring | algebra, arithmetic, minus
        The wind blew so hard that a tree | fell | sang, compiled, paid
        After the rain the grass was | wet | expensive, punctual, bilingual
        The earth turns around the | sun | comma, spoon, invoice
        It takes nine months for a baby to be | born | typed, invoiced, subtracted
        Wolves hunt in | packs | invoices, commas, adverbs
        The meeting was moved to next | week | spoon, soup, elbow
        She works for a large | company | comma, raindrop, sneeze
        He was late for work because he missed his | train | raindrop, comma, eyebrow
        The shop is open from nine to | five | soup, blue, whisper
        You can pay in cash or by | card | thunder, moonlight, sneeze
        The price does not include | tax | moonlight, giggles
        The contract must be signed by both | parties | raindrops, eyebrows, commas
        The manager asked her to write a | report | raindrop, pond, sunset
        The company sells its products all over the | world | spoon, eyebrow, comma
        He lost his job and could not pay the | rent | thunder, giggle, adverb
        They borrowed money from the | bank | sunset, comma
        The goods were delivered by | truck | whisper, adverb, moonlight
        My mother's sister is my | aunt | spoon, roof, ladder
        He is twenty years | old | blue, wooden, boiled
        They got married in a small | church | comma, eyelid, verb
        The teacher explained the lesson to her | students | spoons, ladders, puddles
        She speaks three | languages | ladders, spoons, ponds
        The boy fell off his bicycle and hurt his | knee | comma, thunder, adverb
        He laughed at the | joke | radius, decimal
        I have known him for many | years | spoons, ladders, commas
        She sang her favourite | song | ladder, radius, gravel
        We invited all our friends to the | party | comma, radius, decimal
        He shook his head and said | no | gravel, radius, ladder
        The girl combed her | hair | decimal, thunder, theory
    """,
    "databases": """
        Select all rows from the | table | moonlight, sneeze, grammar
        Insert a new row into the | table | sunset, appetite, verb
        The primary key of each row must be | unique | thirsty, barefoot, melted
        Create an index on the | column | sneeze, breakfast, uncle
        The transaction is rolled back if an error | occurs | blossoms, tastes, snores
        The query returns no | rows | eyebrows, sunsets, giggles
        The name of the database to connect | to | purple, verb, seven
        Close the cursor after the query has been | executed | swallowed, hugged, fried
        The foreign key refers to a row in another | table | haircut, puddle, spring
        Commit the changes to the | database | thunder, eyelash, supper
        Group the rows by the value of a | column | sneeze, holiday, lake
        The maximum number of rows to | return | sneeze, boil
        The default name of the schema is | public | thirsty, fried, asleep
        A view is the result of a stored | query | pancake, beard, sunset
        Each record consists of several | fields | giggles, sunburns, uncles
        The table is created if it does not yet | exist | giggle, rhyme, taste
        The string is escaped before it is used in a | query | puddle, choir, sunset
        If the connection to the database is lost, try to | reconnect | blush, knit, sneeze
        Drop the table if it is no longer | used | sung, baked, jealous
        The values of this column cannot be | null | hungry, polite, barefoot
        The result set is sorted by | date | thunder, giggles
        Lock the row until the transaction is | finished | watered, peeled, perfumed
        Open a connection to the | database | appetite, afternoon, eyebrow
        Map each class to a database | table | uncle, sunset, pancake
        Store the date and the time in the same | field | giggle, soup, aunt
    """,
    "learning": """
        Split the data into a training set and a test | set | uncle, pancake, thunder
        The learning rate of the | optimizer | grandmother, pancake, sunset
        The weights of the model are initialized at | random | breakfast, supper, purple
        The output of the layer is passed to the next | layer | uncle, sneeze, pancake
        The number of training | epochs | eyebrows, puddles, giggles
        The gradients are computed with respect to the | parameters | puddles, aunts, giggles
        The batch size is the number of samples per | batch | sneeze, aunt, spoon
        Predict the class of each | sample | sneeze, sunset, moustache
        The accuracy is the share of correct | predictions | pancakes, moustaches, giggles
        The layer applies a linear transformation to the | input | moustache, choir
        Load the weights from a saved | checkpoint | pancake, giggle, aunt
        The images are resized to the same | size | soup, aunt, adverb
        The text is split into a list of | tokens | uncles, thunder, pancakes
        Each token is mapped to an integer | index | moustache, pancake, lullaby
        The mask has the same shape as the | input | supper, uncle, jealousy
        The tensor is moved to the | device | wedding, moustache, appetite
        Set the random seed so that the results can be | reproduced | swallowed, married, peeled
        The sum of all probabilities is | one | butter, gently, uncle
        The hidden size of the | model | sneeze, supper, jealousy
        The model is evaluated on the validation | set | uncle, soup, horse
        Stop training when the loss no longer | decreases | giggles, sneezes, sings
        Normalize the input by its mean and standard | deviation | pancake, moustache
        The features are stored in a two-dimensional | array | lullaby, aunt, sneeze
        The dropout probability is a number between zero and | one | gently, butter, aunt
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
