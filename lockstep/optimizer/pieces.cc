#include "lockstep/optimizer/pieces.h"

#include <algorithm>

namespace lockstep {

std::vector<Piece> cut_into_pieces(const std::vector<std::int64_t>& sizes) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < sizes.size(); ++i)
    for (std::int64_t begin = 0; begin < sizes[i]; begin += kMaxRun)
      pieces.push_back({i, begin, std::min(kMaxRun, sizes[i] - begin)});
  return pieces;
}

std::size_t first_piece_of(int rank, int ranks, const std::vector<Piece>& pieces) {
  std::int64_t all = 0;
  for (const Piece& piece : pieces) all += piece.count;
  std::int64_t before = 0;
  std::size_t i = 0;
  for (; i < pieces.size() && before * ranks < all * rank; ++i) before += pieces[i].count;
  return i;
}

}  // namespace lockstep
