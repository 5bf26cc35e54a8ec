"""`helm test`: the API answers through its Service, is ready, and lets nobody in without a key.

The first argument is where it is. Certificates are not checked: it is our own Service, by its name in the cluster.
"""

import ssl
import sys
import urllib.error
import urllib.request

base = sys.argv[1]
unchecked = ssl.create_default_context()
unchecked.check_hostname = False
unchecked.verify_mode = ssl.CERT_NONE

failed = False
for path, expected in (("/healthz", 200), ("/readyz", 200), ("/v1/policies", 401)):
    try:
        with urllib.request.urlopen(base + path, timeout=5, context=unchecked) as answer:
            status, body = answer.status, answer.read()
    except urllib.error.HTTPError as refusal:
        status, body = refusal.code, refusal.read()
    except OSError as error:
        status, body = 0, str(error).encode()
    as_expected = status == expected
    failed = failed or not as_expected
    print("ok  " if as_expected else "FAIL", path, status, "" if as_expected else body.decode(errors="replace"))
sys.exit(failed)
