// SPDX-License-Identifier: Apache-2.0
// lockstep/error.h: what lockstep throws. An error says what happened, where, why it is likely, and what to do next.
//
// Flow:    thrown anywhere in the library -> caught by the user's program, or printed by the command line
// Owns:    its text
// Threads: values; copy and throw them from any thread
// Ranks:   no communication
#pragma once

#include <exception>
#include <string>

namespace lockstep {

// The parts of a message; an empty part is left out when the message is written.
struct ErrorText {
  std::string what{};    // what happened, with the operation and the name of the thing it happened to
  std::string here{};    // which rank, file and offset, or option
  std::string peer{};    // the other rank, where there is one
  std::string likely{};  // the likely cause
  std::string next{};    // what to do about it
};

// The base of everything lockstep throws on purpose. `what()` is the whole message over several lines:
//
//   lockstep: DataError: train-labels-idx1-ubyte is truncated: 60008 bytes expected, 4096 found
//     here:   /data/train-labels-idx1-ubyte, offset 4096
//     likely: an interrupted download
//     next:   fetch the file again
class Error : public std::exception {
 public:
  Error(std::string kind, ErrorText text);
  const char* what() const noexcept override { return message_.c_str(); }
  const std::string& kind() const { return kind_; }
  const ErrorText& text() const { return text_; }

 private:
  std::string kind_;
  ErrorText text_;
  std::string message_;
};

// One class per kind of error, so that a program can catch those that it can handle.
#define LOCKSTEP_ERROR(Kind)                                         \
  class Kind : public Error {                                        \
   public:                                                           \
    explicit Kind(ErrorText text) : Error(#Kind, std::move(text)) {} \
  }

LOCKSTEP_ERROR(UsageError);        // an option or argument that makes no sense; the command exits with 2
LOCKSTEP_ERROR(EnvironmentError);  // the launcher's variables are incomplete or contradict each other
LOCKSTEP_ERROR(RendezvousError);   // the ranks did not find each other before the deadline
LOCKSTEP_ERROR(MismatchError);     // ranks that should agree (on a model, a shape, an operation) do not
LOCKSTEP_ERROR(PeerLost);          // another rank died, stopped or failed
LOCKSTEP_ERROR(DeviceError);       // a tensor is on a device that the call does not support
LOCKSTEP_ERROR(DataError);         // a dataset is missing, damaged or contradicts itself
LOCKSTEP_ERROR(CheckpointError);   // a checkpoint can't be written, or is damaged
LOCKSTEP_ERROR(NonFiniteError);    // the loss or a gradient is NaN or infinite
LOCKSTEP_ERROR(SystemError);       // a call to the operating system failed

#undef LOCKSTEP_ERROR

// A SystemError for the call that just failed: `doing` names the action ("open"), `subject` the thing; reads errno.
SystemError system_error(const std::string& doing, const std::string& subject);

}  // namespace lockstep
