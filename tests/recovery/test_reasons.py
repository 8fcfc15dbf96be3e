import inspect
import re

import pytest

from onelayer import Reason, recover
from onelayer.recovery import validation


def test_no_two_reasons_read_alike():
    # An enumeration takes a second name for the same text as the same reason.
    assert len(Reason) == len(Reason.__members__)


@pytest.mark.parametrize("reason", list(Reason))
def test_remedies_name_only_what_recover_takes(reason):
    options = re.findall(r"(\w+)=", reason.remedy)
    assert set(options) <= set(inspect.signature(recover).parameters)
    for method in re.findall(r"method='(\w+)'", reason.remedy):
        validation.method(method)
