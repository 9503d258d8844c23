"""The policies of docs/storage.md, as servers enforce them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "storage.md"
ROLES = ("create", "read", "retention")
# The permission for each request; source: Amazon S3 User Guide, "Required permissions for Amazon S3 API operations".
NEEDED = {
    "PutObject": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListParts": "s3:ListMultipartUploadParts",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "ListObjectsV2": "s3:ListBucket",
    "ListObjectVersions": "s3:ListBucketVersions",
    "DeleteObject": "s3:DeleteObject",
}


def policy_of(role: str) -> dict[str, Any]:
    """The policy of a role in the document."""
    (text,) = re.findall(rf"(?ms)^```json {role}\n(.*?)^```", DOCUMENT.read_text())
    policy: dict[str, Any] = json.loads(text)
    return policy


def statements_of(role: str, effect: str) -> list[dict[str, Any]]:
    """The statements of a role's policy that allow or deny something."""
    return [statement for statement in policy_of(role)["Statement"] if statement["Effect"] == effect]


def permissions_of(role: str) -> set[str]:
    """The permissions that a role has for some object."""
    found: set[str] = set()
    for statement in statements_of(role, "Allow"):
        actions = statement["Action"]
        found.update([actions] if isinstance(actions, str) else actions)
    return found


def forbidden_operations(role: str) -> frozenset[str]:
    """The requests that a role may not make."""
    return frozenset(operation for operation, needed in NEEDED.items() if needed not in permissions_of(role))


def unwritable_keys(role: str) -> tuple[str, ...]:
    """The patterns of the keys that a role may not write; no statement of the document denies anything else."""
    prefix = "arn:aws:s3:::BUCKET/FOLDER/"
    statements = statements_of(role, "Deny")
    assert all(statement["Action"] == "s3:PutObject" for statement in statements)
    return tuple(resource.removeprefix(prefix) for statement in statements for resource in statement["Resource"])


def bucket_policy(bucket: str, folder: str, users: dict[str, str]) -> str:
    """One policy for a bucket: in `folder`, each user in `users` (by role) has the permissions of that role."""
    statements = []
    for role, user in users.items():
        text = json.dumps(policy_of(role)["Statement"]).replace("BUCKET", bucket).replace("FOLDER", folder)
        statements += [statement | {"Principal": {"AWS": [user]}} for statement in json.loads(text)]
    return json.dumps({"Version": "2012-10-17", "Statement": statements})
