// Texts for completion errors.
#pragma once

#include <cstdint>
#include <string>

#include "common/completions.h"

namespace adaptive::rdma {

struct StatusText {
  const char* name;   // "REM_ACCESS_ERR"
  const char* cause;  // the usual cause
  Failure::Kind kind;
};

// Describes an ibv_wc_status, which is a number so that the verbs headers are not needed.
StatusText status_text(int status) noexcept;

// "RDMA write failed with REM_ACCESS_ERR (status 10, vendor code 0x88): <cause>"
std::string describe_status(const std::string& operation, int status, std::uint32_t vendor_code);

}  // namespace adaptive::rdma
