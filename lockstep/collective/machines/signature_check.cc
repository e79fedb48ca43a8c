// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/signature_check.h"

#include <array>
#include <bit>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::uint32_t kCheckTag = 0;  // of the signatures themselves

// FNV-1a over the signature's 64-bit words; never kCheckTag.
std::uint32_t tag_of(const Signature& signature) {
  using Words = std::array<std::uint64_t, sizeof(Signature) / sizeof(std::uint64_t)>;
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const std::uint64_t word : std::bit_cast<Words>(signature)) hash = (hash ^ word) * 0x100000001b3;
  return static_cast<std::uint32_t>(hash ^ hash >> 32) | 1;
}

std::string wants(int machine, const Signature& signature) {
  return concat("machine ", machine, " wants ", to_string(signature));
}

}  // namespace

void SignatureCheck::begin(MachineLink& link, const Signature& mine) {
  signatures_.assign(link.size(), mine);
  receives_.resize(link.size());
  link.set_tag(kCheckTag);
  for (const int peer : link.peers()) {
    link.receive(peer, reinterpret_cast<std::byte*>(&signatures_[peer]), sizeof(Signature), receives_[peer]);
    link.send(peer, reinterpret_cast<const std::byte*>(&signatures_[link.rank()]), sizeof(Signature), sends_);
  }
  link.set_tag(tag_of(mine));
}

void SignatureCheck::compare(MachineLink& link, int peer) {
  link.wait(receives_[peer]);
  const Signature& mine = signatures_[link.rank()];
  const Signature& theirs = signatures_[peer];
  if (theirs == mine) return;
  throw MismatchError({.what = concat(wants(link.rank(), mine), ", ", wants(peer, theirs)),
                       .likely = "ranks that do not make the same calls in the same order",
                       .next = "compare the programs and their inputs on both machines"});
}

void SignatureCheck::finish(MachineLink& link) {
  for (int peer = 0; peer < link.size(); ++peer) compare(link, peer);
  link.wait(sends_);
}

}  // namespace lockstep
