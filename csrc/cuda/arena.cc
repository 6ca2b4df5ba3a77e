#include "cuda/arena.h"

#include <cstring>
#include <string>

#include "common/error.h"
#include "common/mapped_region.h"

namespace adaptive::cuda {
namespace {

constexpr std::size_t kAlignment = 512;
// Smaller allocations would share a block with other memory, and an importer would see the whole
// block.
constexpr std::size_t kBlock = std::size_t{2} << 20;

struct Header {
  std::uint32_t slots = 0;
  std::uint32_t zero = 0;
  std::uint64_t slot_bytes = 0;
  MemoryExport memory{};
  // The events follow: `written` of all slots, then `consumed`.
};
static_assert(sizeof(Header) == 80, "sent as bytes");

std::size_t exported_bytes(unsigned slots) noexcept {
  return sizeof(Header) + 2 * slots * sizeof(EventExport);
}

std::size_t stride_for(std::size_t slot_bytes) noexcept {
  return round_up(slot_bytes, kAlignment);
}

}  // namespace

Arena::Arena(const std::shared_ptr<const Context>& context, unsigned slots, std::size_t slot_bytes)
    : stride_(stride_for(slot_bytes)), size_bytes_(round_up(slots * stride_, kBlock)) {
  const Current current(*context);
  memory_ = allocate(context, size_bytes_);
  for (unsigned slot = 0; slot < slots; ++slot) {
    written_.push_back(make_event(context, true));
    consumed_.push_back(make_event(context, true));
  }
}

std::vector<std::uint8_t> Arena::export_all() const {
  const Current current(context());
  Header header;
  header.slots = static_cast<std::uint32_t>(written_.size());
  header.slot_bytes = stride_;
  header.memory = export_memory(memory_);
  std::vector<std::uint8_t> bytes(exported_bytes(header.slots));
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::uint8_t* next = bytes.data() + sizeof(header);
  for (const std::vector<Event>* events : {&written_, &consumed_}) {
    for (const Event& event : *events) {
      const EventExport handle = export_event(event);
      std::memcpy(next, &handle, sizeof(handle));
      next += sizeof(handle);
    }
  }
  return bytes;
}

void Arena::leak() noexcept {
  memory_.leak();
  for (std::vector<Event>* events : {&written_, &consumed_}) {
    for (Event& event : *events) {
      event.leak();
    }
  }
}

PeerArena::PeerArena(const std::shared_ptr<const Context>& context,
                     const std::vector<std::uint8_t>& exported, unsigned slots,
                     std::size_t slot_bytes)
    : stride_(stride_for(slot_bytes)) {
  Header header;
  if (exported.size() < sizeof(header)) {
    throw Error("the peer's description of its device memory has " +
                std::to_string(exported.size()) + " bytes; do both ranks run the same version?");
  }
  std::memcpy(&header, exported.data(), sizeof(header));
  if (header.slots != slots || header.slot_bytes != stride_ ||
      exported.size() != exported_bytes(slots)) {
    throw Error("the peer has " + std::to_string(header.slots) + " slots of " +
                std::to_string(header.slot_bytes) + " bytes in device memory where " +
                std::to_string(slots) + " of " + std::to_string(stride_) +
                " were expected; do both ranks have the same settings?");
  }
  const Current current(*context);
  memory_ = open_memory(context, header.memory);
  const std::uint8_t* next = exported.data() + sizeof(header);
  for (std::vector<Event>* events : {&written_, &consumed_}) {
    for (unsigned slot = 0; slot < slots; ++slot) {
      EventExport handle;
      std::memcpy(&handle, next, sizeof(handle));
      events->push_back(open_event(context, handle));
      next += sizeof(handle);
    }
  }
}

}  // namespace adaptive::cuda
