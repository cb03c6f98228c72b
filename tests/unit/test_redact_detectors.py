"""Every token that detect-secrets knows by its form alone is a secret here: made of its own expressions."""

import re

import pytest
from detect_secrets.plugins import (
    aws,
    discord,
    github_token,
    gitlab_token,
    mailchimp,
    npm,
    openai,
    pypi_token,
    sendgrid,
    square_oauth,
    stripe,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpukiln.redact import holds_secret, redact

DETECTORS = [
    aws.AWSKeyDetector.denylist[0],  # the second is an assignment, which our own rules know by its name
    *discord.DiscordBotTokenDetector.denylist,
    *github_token.GitHubTokenDetector.denylist,
    *gitlab_token.GitLabTokenDetector.denylist,
    *npm.NpmDetector.denylist,
    *openai.OpenAIDetector.denylist,
    *pypi_token.PypiTokenDetector.denylist,
    *sendgrid.SendGridDetector.denylist,
    *square_oauth.SquareOAuthDetector.denylist,
    *stripe.StripeDetector.denylist,
]
# Theirs are wider than what is issued: Mailchimp's is hexadecimal, Telegram's begins with AA, Slack's lengths
# are those of gitleaks (config/gitleaks.toml).
NARROWER = [
    re.compile(mailchimp.MailchimpDetector.denylist[0].pattern.replace("0-9a-z", "0-9a-f", 1)),
    re.compile(r"xox[bp]-[0-9]{10,13}-[0-9]{10,13}-[a-zA-Z0-9]{24}"),
    re.compile(r"https://hooks\.slack\.com/services/T[A-Z0-9]{8,11}/B[A-Z0-9]{8,11}/[A-Za-z0-9]{24}"),
    re.compile(r"\d{8,10}:AA[0-9A-Za-z_-]{33}"),
]


@pytest.mark.parametrize("form", [*DETECTORS, *NARROWER], ids=lambda form: form.pattern[:32])
def test_a_token_that_detect_secrets_knows_by_its_form_is_hidden(form: re.Pattern[str]) -> None:
    ascii_form = re.compile(form.pattern, form.flags & ~re.UNICODE | re.ASCII)

    @settings(
        max_examples=20, database=None, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck]
    )
    @given(st.from_regex(ascii_form, fullmatch=True).filter(str.isprintable))
    def run(token: str) -> None:
        line = f"export SETTING={token}"
        assert holds_secret(line)
        assert token not in redact(line)

    run()
