import hashlib
import hmac

from scriptdispatch.mq.signing import sign, verify

SECRET = "a secret of the test"
MESSAGE = {
    "type": "LOG",
    "execution_id": "e",
    "task_id": "t",
    "content": "grüße 你好",
    "result": {"b": 1, "a": [1, 2.5, None]},
}


def test_the_signature_is_hmac_over_sorted_keys_without_spaces_in_utf8() -> None:
    canonical = '{"content":"grüße 你好","execution_id":"e","result":{"a":[1,2.5,null],"b":1},"task_id":"t","type":"LOG"}'
    assert sign(MESSAGE, SECRET) == hmac.new(SECRET.encode(), canonical.encode(), hashlib.sha256).hexdigest()


def test_a_signed_message_is_verified_whatever_the_order_of_its_keys() -> None:
    signed = {"signature": sign(MESSAGE, SECRET), **dict(reversed(MESSAGE.items()))}
    assert verify(signed, SECRET)


def test_a_changed_unsigned_or_oddly_signed_message_is_not() -> None:
    signed = {**MESSAGE, "signature": sign(MESSAGE, SECRET)}
    assert not verify({**signed, "content": "other"}, SECRET)
    assert not verify(signed, "another secret")
    assert not verify(MESSAGE, SECRET)
    for odd in (None, 7, "", "é" * 64, ["x"]):
        assert not verify({**MESSAGE, "signature": odd}, SECRET)
