#include "rdma/status.h"

#include <array>
#include <cstddef>
#include <cstdio>

namespace adaptive::rdma {
namespace {

constexpr Failure::Kind kLost = Failure::Kind::kPeerLost;
constexpr Failure::Kind kBroken = Failure::Kind::kTransport;

// Indexed by ibv_wc_status, whose values are fixed by the kernel's interface.
constexpr std::array<StatusText, 22> kTexts{{
    {"SUCCESS", "nothing is wrong", kBroken},
    {"LOC_LEN_ERR", "a message was longer than the receive posted for it: a fault of this program",
     kBroken},
    {"LOC_QP_OP_ERR", "the device refused the request: a fault of this program or its driver",
     kBroken},
    {"LOC_EEC_OP_ERR", "the device refused the request: a fault of its driver", kBroken},
    {"LOC_PROT_ERR",
     "local memory is not registered for this: a fault of this program, or a fork took its pages",
     kBroken},
    {"WR_FLUSH_ERR",
     "the queue pair had ended before; the other end's message or an earlier one says why",
     kBroken},
    {"MW_BIND_ERR", "a memory window could not be bound: a fault of this program", kBroken},
    {"BAD_RESP_ERR", "the peer's device sent an unexpected reply: check the firmware of both",
     kBroken},
    {"LOC_ACCESS_ERR",
     "a peer wrote outside the memory that it may write: does it run the same version?", kBroken},
    {"REM_INV_REQ_ERR",
     "the peer's device did not understand the request: does it run the same version?", kBroken},
    {"REM_ACCESS_ERR",
     "the peer's memory is not, or no longer, open to this rank: it has closed the channel or "
     "runs another version (wrong remote key or address)",
     kBroken},
    {"REM_OP_ERR", "the peer's device could not execute the request: see that node's kernel log",
     kBroken},
    {"RETRY_EXC_ERR",
     "no reply came within all retries: the peer's process or node has ended, the link is cut, "
     "or a firewall, MTU or priority setting drops the packets (RoCE: UDP port 4791)",
     kLost},
    {"RNR_RETRY_EXC_ERR",
     "the peer is alive but has no receives posted: it is stopped in a debugger, hangs, or runs "
     "another version",
     kBroken},
    {"LOC_RDD_VIOL_ERR", "a fault of the device's driver", kBroken},
    {"REM_INV_RD_REQ_ERR", "a fault of the device's driver", kBroken},
    {"REM_ABORT_ERR", "the peer's device aborted it: see that node's kernel log", kBroken},
    {"INV_EECN_ERR", "a fault of the device's driver", kBroken},
    {"INV_EEC_STATE_ERR", "a fault of the device's driver", kBroken},
    {"FATAL_ERR", "the device has failed: see the kernel log of this node", kBroken},
    {"RESP_TIMEOUT_ERR", "the peer did not answer in time: is its node alive?", kLost},
    {"GENERAL_ERR", "the device gives no reason: see the kernel log of this node", kBroken},
}};

}  // namespace

StatusText status_text(int status) noexcept {
  if (status >= 0 && static_cast<std::size_t>(status) < kTexts.size()) {
    return kTexts[static_cast<std::size_t>(status)];
  }
  return {"an unknown status", "see the kernel log of this node", kBroken};
}

std::string describe_status(const std::string& operation, int status, std::uint32_t vendor_code) {
  const StatusText text = status_text(status);
  char vendor[16];
  std::snprintf(vendor, sizeof(vendor), "0x%x", vendor_code);
  return operation + " failed with " + text.name + " (status " + std::to_string(status) +
         ", vendor code " + vendor + "): " + text.cause;
}

}  // namespace adaptive::rdma
