// The exceptions of the core:
//
//   Error             a rule was broken: foreign memory, wrong peer, misuse
//   +- SystemError    a system call failed; carries its name, its argument and errno's text
//   +- DeadlineError  nothing happened within the time limit
//   +- PeerLostError  the process at the other end has exited
//
// std::invalid_argument is thrown for arguments that no call could accept.
#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace adaptive {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class SystemError : public Error {
 public:
  SystemError(const std::string& call, const std::string& argument, int code)
      : Error(call + "(" + argument + ") failed: " + std::generic_category().message(code)),
        code_(code) {}

  int code() const noexcept { return code_; }

 private:
  int code_;
};

class DeadlineError : public Error {
 public:
  using Error::Error;
};

class PeerLostError : public Error {
 public:
  using Error::Error;
};

// Throws a SystemError for the system call that failed, with the text of errno.
[[noreturn]] inline void throw_errno(const std::string& call, const std::string& argument) {
  const int code = errno;
  throw SystemError(call, argument, code);
}

}  // namespace adaptive
