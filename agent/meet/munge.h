// SPDX-License-Identifier: Apache-2.0
// agent/meet/munge.h: credentials of munge, the service by which the machines of a cluster tell each other who a user is: texts
// that this user alone can read, on machines whose munged has the same key.
//
// Flow:    job_secret.h -> here -> libmunge.so.2, loaded when it is needed -> the machine's munged
// Owns:    nothing
// Threads: any. Blocks until munged answers: a millisecond; libmunge gives up after some seconds
#pragma once

#include <optional>
#include <string>

namespace lockstep {

// A credential with `text` in it, which is valid for some minutes and can be read once on each machine. Nothing: no
// libmunge.so.2, or no munged that answers.
std::optional<std::string> seal_by_munge(const std::string& text);

// The text in a credential that a process of this user has made. Throws EnvironmentError: it is none, of another user, too
// old, or munged has another key here.
std::string open_by_munge(const std::string& credential);

}  // namespace lockstep
