# Of what uv, pip and apt-get print, keep what shows a person the progress: large downloads, counts and errors.
function is_large(text) { return text ~ /[0-9] ?[GM]i?B/ }
/^(Collecting|Processing|Requirement already) / && ++found % 50 == 0 { print "  found " found " packages"; fflush() }
/^ *(Downloading|Using cached) / && is_large($0) { sub(/^.*\//, "", $2); print "  " $2, $3, $4; fflush(); next }
/^Installing collected packages:/ { print "  installing " NF - 3 " packages, this takes a minute"; fflush(); next }
/^Successfully installed/ { print "  installed " NF - 2 " packages"; fflush(); next }
/^Installed [0-9]+ packages in/ { print "  installed " $2 " packages"; fflush(); next }
/^Need to get/ { print "  " $0; fflush(); next }
/^Get:/ && is_large($0) { print "  " $5, $(NF - 1), $NF; fflush(); next }
/^Setting up / && ++set_up % 50 == 0 { print "  set up " set_up " packages"; fflush(); next }
/^(E|ERROR|error|Err)[: ]|^ +(×|╰|hint|Caused)/ { print; fflush() }
